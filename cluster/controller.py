"""The controller: leases tasks to engines, feeds the learner, streams new weights back.

Its loops run side by side on one event loop and share ``Flow`` and one event, ``Pulse``.

=========  ======================  ==============================  ================================  ====================
loop       consumes                waits for                       is unblocked by                   produces
=========  ======================  ==============================  ================================  ====================
dispatch   tasks                   a free slot                     confirm, filter, fail, abandon    groups in flight
group      one group in flight     its engine and its grader       the engine (bounded by the watch) a ready group, or none
learn      G ready groups          the groups; then the learner    group; the learner's step         version n + 1
publish    version n + 1           the publication before it       staging and commit on all engines confirmed n + 1
watch      nothing                 ``stall_timeout_s``             -                                 the end of the run
=========  ======================  ==============================  ================================  ====================

No cycle of waits: dispatch waits for slots; a slot is freed by a confirmation; a confirmation waits for the engines only; the
learner waits for groups that hold slots, of which there are at least G.  At ``max_staleness: 0`` the same loops alternate.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from typing import Any

from slipstream.algos.advantages import has_signal
from slipstream.cluster import recovery
from slipstream.cluster.actors import RunPlace
from slipstream.cluster.assembly import assemble
from slipstream.cluster.drafts import DraftUsage, saved_drafts, share_drafts, summarise_drafts
from slipstream.cluster.evaluation import Encoded, Evaluator
from slipstream.cluster.faults import cause, describe
from slipstream.cluster.fleet import Fleet
from slipstream.cluster.flow import Flow
from slipstream.cluster.idle import IdleGroups
from slipstream.cluster.learners import LearnerGroup
from slipstream.cluster.publication import Publisher
from slipstream.cluster.pulse import Pulse, watch
from slipstream.cluster.scoring import Scoring
from slipstream.cluster.supervised import Imitation
from slipstream.cluster.telemetry import Telemetry, summarise
from slipstream.cluster.transport import open_transport, transport_name
from slipstream.cluster.usage import Usage
from slipstream.core.metrics import Last, Mean, Metrics
from slipstream.core.records import Group, Task, WeightVersion
from slipstream.core.rundir import RunDirectory
from slipstream.core.schema import Recipe
from slipstream.rollout.failures import GroupFailed
from slipstream.rollout.groups import GroupAborted

log = logging.getLogger("slipstream")


class Controller:
    """One attempt of one run.  ``run`` tells the story; ``snapshot`` shows where it stands."""

    def __init__(self, recipe: Recipe, run: RunDirectory, parts: recovery.Parts, search_path: str) -> None:
        self.recipe = recipe
        self.run_dir = run
        self.parts = parts
        self.cursor = parts.cursor
        self.stage = "starting"
        self.start_s: float | None = None
        place = RunPlace(parts.run_id, str(run.logs), search_path)
        self.fleet = Fleet(recipe, place)
        self.learners = LearnerGroup(recipe, place)
        self.telemetry = Telemetry(run, recipe.name, recipe.monitor.sinks, parts.history, parts.evaluations)
        self.flow = Flow(recipe.schedule, parts.version, parts.ledger, filter_overlong=recipe.algo.overlong.filter)
        for group in parts.ready:
            self.flow.restore(group)
        self.pulse = Pulse()
        self.evaluator = Evaluator(recipe.monitor.eval, parts.held_out, self.fleet, self.flow, self.telemetry, self.pulse.beat)
        self.transport = open_transport(transport_name(recipe), self.fleet, self.learners)
        self.publisher = Publisher(self.transport, self.flow, self.telemetry, self._confirmed, parts.publishes)
        self.imitation = Imitation(recipe, self.cursor, parts.encoder, self.learners)
        self.usage = Usage()
        self.drafts = DraftUsage(recipe.rollout.speculation)
        self.places: dict[str, tuple[int, int]] = {}
        self.saved_batch = parts.version.batch if parts.saved is not None else None
        self.scoring = Scoring(recipe, self.learners, parts.kl_coefficient)
        self.interrupted = collections.deque(parts.in_flight)
        self._groups: set[asyncio.Task[None]] = set()
        self._idle = IdleGroups(recipe.schedule.max_idle_groups or 50 * self.flow.groups_per_step)
        self._attempt: asyncio.Task[None] | None = None
        self._loops: asyncio.TaskGroup
        self._stopping = False

    # ---- the story

    async def run(self) -> dict[str, Any]:
        """Train to the end, or until ``stop``; returns the summary, which is written in every case.  Raises what went wrong."""
        status, error = "failed", None
        self.telemetry.event("start", **self._plan())
        try:
            self._attempt = asyncio.create_task(self._train())
            await asyncio.wait([self._attempt])
            if not (self._stopping and self._attempt.cancelled()):
                self._attempt.result()
            status = "interrupted" if self._stopping else "completed"
        except BaseException as problem:
            error = describe(problem)
            log.exception("the run failed")
            raise
        finally:
            self.stage = status
            try:
                summary = self._summary(status, error)
                self.telemetry.event("end", status=status, error=error)
                self.run_dir.write_summary(summary)
            finally:  # even on a full disk
                await self.fleet.stop()
                self.learners.stop()
                self.telemetry.close()
                self.run_dir.close()
        return summary

    async def _train(self) -> None:
        async with asyncio.TaskGroup() as loops:
            self._loops = loops
            limit = self.recipe.cluster.stall_timeout_s
            watching = loops.create_task(watch(self.pulse, self.fleet, self.learners, limit, self._state))
            engines = loops.create_task(self._start_fleet())
            await self.learners.start(self.parts.models.policy)
            await self._prepare_learner()
            self.stage = "waiting for the engines"
            await engines
            self.stage = "publishing weights"
            await self.transport.connect()
            await self.publisher.publish(self.flow.learner)
            if self.parts.saved is None:
                self.stage = "evaluating"
                await self.evaluator.run(0)
            self.stage, self.start_s = "training", time.time() - self.telemetry.started
            stats = await self.fleet.stats()
            self.usage.begin(stats)
            self.drafts.begin([s.drafts for s in stats])
            sharing = self._share_drafts(loops)
            await (self._imitate() if self.recipe.algo.name == "sft" else self._reinforce())
            await self.publisher.finish()
            if self.flow.confirmed < self.flow.learner and not self._stopping:
                await self.publisher.publish(self.flow.learner)
            self.stage = "saving"
            await recovery.save(self)
            if self._stopping:
                self.evaluator.cancel()
            else:
                self.stage = "evaluating"
                await self.evaluator.finish()
                await self.evaluator.run(self.flow.learner.batch)
            for loop in (watching, *sharing):
                loop.cancel()

    def _share_drafts(self, loops: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        speculation = self.recipe.rollout.speculation
        every_s = speculation.tts.share_every_s if speculation.learns else None
        return [loops.create_task(share_drafts(self.fleet, every_s, self.telemetry))] if every_s else []

    async def _start_fleet(self) -> None:
        transport = transport_name(self.recipe)
        models, states = self.parts.models, saved_drafts(self.parts.saved)
        await self.fleet.start(models.policy, self.flow.learner, self.cursor.first(), transport, models.draft, states)
        self.pulse.beat()

    async def _prepare_learner(self) -> None:
        """Weights, optimizer, reference, teacher and critic as they are to be before the first batch."""
        recipe, saved, models = self.recipe, self.parts.saved, self.parts.models
        # Those in folders first: one that does not load is found before the warm start, not after it.
        if models.teacher is not None:
            await self.learners.set_teacher(models.teacher)
        if models.reference is not None:
            await self.learners.set_reference(models.reference)
        if models.critic is not None:
            await self.learners.set_critic(models.critic)
        if saved is None and recipe.warm_start is not None:
            self.stage = "warm start"
            async for step, loss in self.imitation.warm_start(recipe.warm_start, self.flow.learner):
                self.pulse.beat()
                if step % 50 == 0 or step == recipe.warm_start.steps:
                    self.telemetry.event("warm_start", step=step, loss=loss)
        await self.learners.begin_phase(recipe.trainer.optimizer, recipe.policy_steps)
        if saved is not None:
            await self.learners.load(str(saved / recovery.LEARNER), recipe.policy_steps)
        elif recipe.algo.kl.coefficient and models.reference is None:
            await self.learners.set_reference(None)
        if saved is None and recipe.algo.critic is not None and models.critic is None:
            await self.learners.set_critic(None)
        if saved is None and recipe.warm_start is not None:
            await recovery.save(self)
        self.pulse.beat()

    async def _imitate(self) -> None:
        """``algo.name: sft``: every step is a commit on ``groups_per_step`` demonstrations; engines serve evaluation only."""
        while self.flow.learner.batch < self.recipe.schedule.steps and not self._stopping:
            started = time.perf_counter()
            trained = await self.imitation.step(self.recipe.schedule.groups_per_step, self.flow.learner)
            if trained is None:
                break
            samples, metrics = trained
            version = self.flow.imitated(samples)
            await self._committed(version, 0.0, {**metrics, "time/step": Mean(time.perf_counter() - started)})

    # ---- reinforcement: the loops of the table above

    async def _reinforce(self) -> None:
        async with asyncio.TaskGroup() as loops:
            dispatch = loops.create_task(self._dispatch(loops))
            await self._learn()
            self.flow.close()
            dispatch.cancel()
            for group in list(self._groups):
                group.cancel()

    async def _dispatch(self, loops: asyncio.TaskGroup) -> None:
        """Fill free slots with the next tasks, no further than the remaining steps need; interrupted tasks come first."""
        while self.interrupted:
            await self.pulse.until(lambda: True if self.flow.free > 0 else None)
            self._lease(loops, self.cursor.at(*self.interrupted.popleft()), again=True)
        while True:
            await self.pulse.until(lambda: True if self._room() > 0 else None)
            entry = self.cursor.next()
            if entry is None:
                self.flow.close()
                self.pulse.beat()
                return
            self._lease(loops, entry)

    def _room(self) -> int:
        steps_left = self.recipe.schedule.steps - self.flow.learner.batch
        wanted = steps_left * self.flow.groups_per_step - self.flow.live - len(self.flow.training)
        return min(self.flow.free, wanted)

    def _lease(self, loops: asyncio.TaskGroup, entry: Encoded, *, again: bool = False) -> None:
        task, prompt_ids = entry
        size = self.recipe.schedule.group_size
        version = (self.flow.redispatch if again else self.flow.dispatch)(task.id, size)
        self.places[task.id] = (task.epoch, task.position)
        self.telemetry.event("dispatch", group_id=task.id, version=str(version), samples=size, again=again)
        group = loops.create_task(self._group(task, prompt_ids, version))
        self._groups.add(group)
        group.add_done_callback(self._groups.discard)

    async def _group(self, task: Task, prompt_ids: tuple[int, ...], version: WeightVersion) -> None:
        """One group from lease to buffer.  A failed grader or environment fails it, with the reason; a dead engine the run."""
        size = self.recipe.schedule.group_size
        try:
            group = await self.fleet.sample(self.fleet.pick(version), task, prompt_ids, version, size)
        except GroupFailed as wrapped:
            problem = cause(wrapped)  # as the engine raised it: Ray's own text is a whole traceback
            assert isinstance(problem, GroupFailed)
            self.flow.fail(task.id)
            self._gone("failed", task.id, size, problem.reason, detail=problem.detail)
            self._idle.failed(problem)
        except GroupAborted:
            self.flow.abandon(task.id)
            self._gone("stale", task.id, size, "aborted: beyond the bound")
        else:
            self._arrived(group)
        del self.places[task.id]
        self.pulse.beat()

    def _arrived(self, group: Group) -> None:
        """Keep the group if it can move the policy.  Raises RuntimeError when none could for a long time."""
        rewards = [t.reward for t in group.trajectories]
        algo = self.recipe.algo
        if algo.kl_in_reward or self.recipe.teaches or has_signal(rewards, algo.advantage):
            self._idle.signal()
            self.flow.finish(group)
            self.telemetry.event("ready", group_id=group.task.id, oldest=str(group.oldest))
            return
        self.flow.filter(group.task.id)
        self._gone("filtered", group.task.id, len(rewards), f"all rewards are {rewards[0]:g}")
        self._idle.equal(rewards[0])

    def _gone(self, kind: str, group_id: str, samples: int, reason: str, **more: str) -> None:
        """``reason`` is what such events are counted by."""
        self.telemetry.event(kind, group_id=group_id, samples=samples, reason=reason, **more)

    async def _learn(self) -> None:
        """Take G groups, train on them, commit, publish; as often as the schedule says or the data lasts."""
        while self.flow.learner.batch < self.recipe.schedule.steps and not self._stopping:
            started = time.perf_counter()
            groups = await self.pulse.until(self._next_batch)
            if not groups:
                if not self._stopping:
                    self._data_ended()
                break
            waited = time.perf_counter() - started
            queued = self.flow.queue_metrics()
            penalty, gap = await self.scoring.penalty(groups), await self.scoring.teacher_gaps(groups)
            assembled = await asyncio.to_thread(
                assemble, groups, self.flow.learner, self.recipe, self.parts.context, penalty, gap
            )
            training = time.perf_counter()
            metrics = await self.learners.train(assembled.batch)
            now = time.perf_counter()
            version = self.flow.commit()
            if (every := self.recipe.algo.kl.refresh_every) and version.batch % every == 0:
                await self.learners.set_reference(None)
            if self.recipe.monitor.samples:
                await asyncio.to_thread(self.telemetry.samples, assembled.records)
            self.telemetry.event("commit", batch=version.batch, version=str(version), groups=[g.task.id for g in groups])
            times: Metrics = {"time/step": Mean(now - started), "time/wait": Mean(waited), "time/train": Mean(now - training)}
            penalised = self.scoring.charged(penalty, version.batch)
            await self._committed(version, waited, {**assembled.metrics, **metrics, **penalised, **queued, **times})

    def _data_ended(self) -> None:
        """Raises RuntimeError where nothing was learnt from all of it."""
        batch, steps = self.flow.learner.batch, self.recipe.schedule.steps
        if batch == self.parts.version.batch:
            self._idle.ended()
        message = f"the data ended after {batch} of {steps} steps; raise data.epochs, or lower schedule.steps"
        log.warning(message)
        self.telemetry.event("warning", message=message)

    def _next_batch(self) -> tuple[Group, ...] | None:
        """The next batch; an empty one when no more groups will come; None while there is reason to wait."""
        for group in self.flow.expire():
            self._gone("stale", group.task.id, len(group.trajectories), "beyond the bound in the buffer")
            self.pulse.beat()
        if self._stopping or self.flow.exhausted:
            return ()
        return self.flow.take()

    # ---- what follows every commit

    async def _committed(self, version: WeightVersion, waited_s: float, metrics: Metrics) -> None:
        """Record the step, keep a checkpoint if one is due, and send the weights on their way."""
        self.pulse.beat()
        stats = await self.fleet.stats()
        usage = self.usage.step(stats, waited_s, float(metrics["time/train_tokens"].value()))  # type: ignore[arg-type]
        ledger: Metrics = {f"ledger/{state}": Last(count) for state, count in self.flow.ledger.as_dict().items()}
        skipped: Metrics = {"data/skipped": Last(self.cursor.skipped)}
        drafts = self.drafts.step([s.drafts for s in stats], version.batch)
        self.telemetry.step(version.batch, {**metrics, **usage, **drafts, **ledger, **skipped, **self.publisher.metrics()})
        every = self.recipe.checkpoint.every
        if every and version.batch % every == 0 and version.batch < self.recipe.schedule.steps:
            await recovery.save(self)
        if self._to_be_published(version.batch):
            await self.publisher.start(version, self._loops)

    def _to_be_published(self, batch: int) -> bool:
        """Whether the engines want these weights: to write with, where they write, or to be evaluated with."""
        schedule = self.recipe.schedule
        due = self.recipe.algo.name != "sft" and batch % schedule.publish_every == 0
        return due or self.evaluator.due(batch)

    async def _confirmed(self, version: WeightVersion) -> None:
        self.pulse.beat()
        if self.flow.on_stale == "drop":
            oldest = max(self.flow.learner.batch - self.flow.bound, 0)
            await self.fleet.abort_before(WeightVersion(version.attempt, oldest), list(self.flow.in_flight))
        if self.evaluator.due(version.batch) and self.parts.version.batch < version.batch < self.recipe.schedule.steps:
            self.evaluator.start(version.batch, self._loops)

    # ---- stopping and showing

    def stop(self) -> None:
        """Finish the step at hand, keep a checkpoint, and end; outside the training there is nothing to finish or to keep."""
        self._stopping = True
        if self._attempt is not None and self.stage not in ("training", "saving"):
            self._attempt.cancel()
        self.pulse.beat()

    def _plan(self) -> dict[str, Any]:
        """The ``start`` event: what the audit, and a resume, have to know."""
        schedule = self.recipe.schedule
        return {
            "attempt": self.flow.learner.attempt,
            "resumed_from": self.flow.learner.batch if self.parts.saved is not None else None,
            "bound": schedule.max_staleness,
            "kv_bound": schedule.max_kv_lag,
            "on_stale": schedule.on_stale,
            "groups_per_step": schedule.groups_per_step,
            "group_size": schedule.group_size,
            "steps": schedule.steps,
            "search_path": self.fleet.place.search_path,
        }

    def _state(self) -> str:
        flow = self.flow
        return (
            f"{self.stage}, {len(flow.in_flight)} groups in flight, {len(flow.ready)} ready, {len(flow.training)} with the "
            f"learner, engines at {flow.confirmed}, learner at {flow.learner}"
        )

    def _summary(self, status: str, error: str | None) -> dict[str, Any]:
        return summarise(
            self.telemetry,
            status=status,
            error=error,
            steps=self.recipe.schedule.steps,
            version=self.flow.learner.batch,
            bound=self.flow.bound,
            ledger=self.flow.ledger.as_dict(),
            idle=self.usage.idle(),
            throughput=self.usage.throughput(),
            start_s=self.start_s,
            publishes=self.publisher.count,
            resumes=self.flow.learner.attempt,
            draft=summarise_drafts(self.recipe.rollout.speculation, self.telemetry),
        )

    def snapshot(self) -> dict[str, Any]:
        """What the live display shows."""
        return {
            "stage": self.stage,
            "warm_step": self.imitation.steps,
            "step": self.flow.learner.batch,
            "version": str(self.flow.learner),
            "confirmed": str(self.flow.confirmed),
            "ledger": self.flow.ledger.as_dict(),
            "metrics": self.telemetry.latest,
            "evaluations": [e.as_dict() for e in self.telemetry.evaluations],
            "wall_s": time.time() - self.telemetry.started,
        }
