"""The controller: leases tasks to engines, feeds the learner, streams new weights back.

Three loops and a watch run side by side on one event loop; all that they share is ``Flow`` and one event, ``_changed``.

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
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from slipstream.algos.advantages import has_signal
from slipstream.cluster import recovery
from slipstream.cluster.actors import RunPlace
from slipstream.cluster.assembly import assemble, assemble_demonstrations, is_rl, kl_penalties, samples_of
from slipstream.cluster.cursor import Cursor, Encoded
from slipstream.cluster.evaluation import evaluate
from slipstream.cluster.fleet import Fleet, Publication
from slipstream.cluster.flow import Flow
from slipstream.cluster.learners import LearnerGroup
from slipstream.cluster.telemetry import Telemetry, summarise
from slipstream.cluster.usage import Usage
from slipstream.core.metrics import Last, Mean, Metrics, Sum
from slipstream.core.records import Group, Task, WeightVersion
from slipstream.core.rundir import RunDirectory
from slipstream.core.schema import Recipe
from slipstream.rollout.groups import GroupAborted
from slipstream.rollout.rewards import GradingError

T = TypeVar("T")
log = logging.getLogger("slipstream")

WATCH_S = 5.0


class Controller:
    """One attempt of one run.  ``run`` tells the story; ``snapshot`` shows where it stands."""

    def __init__(self, recipe: Recipe, run: RunDirectory, parts: recovery.Parts, search_path: str) -> None:
        self.recipe = recipe
        self.run_dir = run
        self.cursor, self.held_out, self.encoder = parts.cursor, parts.held_out, parts.encoder
        self.saved = parts.saved
        self.model_path = parts.model_path
        place = RunPlace(parts.run_id, str(run.logs), search_path)
        self.fleet = Fleet(recipe, place)
        self.learners = LearnerGroup(recipe, place)
        self.telemetry = Telemetry(run, recipe.name, recipe.monitor.sinks, parts.history)
        self.flow = Flow(recipe.schedule, parts.version, parts.ledger)
        for group in parts.ready:
            self.flow.restore(group)
        self.places: dict[str, tuple[int, int]] = {}
        self.stage = "starting"
        self.usage = Usage()
        self.publications: list[Publication] = []
        self._changed = asyncio.Event()
        self._stopping = False
        self._publishing: asyncio.Task[None] | None = None
        self._evaluations: set[asyncio.Task[None]] = set()
        self._idle_groups = 0
        self._last_progress = time.monotonic()
        self._warm_step = 0
        self._running: set[asyncio.Task[None]] = set()

    # ---- the story

    async def run(self) -> dict[str, Any]:
        """Train to the end, or until ``stop``; returns the summary, which is written in every case.  Raises what went wrong."""
        status, error = "failed", None
        try:
            self.telemetry.event("start", **self._plan(), search_path=self.fleet.place.search_path)
            await self._train()
            status = "interrupted" if self._stopping else "completed"
        except BaseException as problem:
            error = describe(problem)
            log.exception("the run failed")
            raise
        finally:
            self.stage = status
            summary = self._summary(status, error)
            self.telemetry.event("end", status=status, error=error)
            self.run_dir.write_summary(summary)
            await self.fleet.stop()
            self.learners.stop()
            self.telemetry.close()
            self.run_dir.close()
        return summary

    def _plan(self) -> dict[str, Any]:
        schedule = self.recipe.schedule
        return {
            "attempt": self.flow.learner.attempt,
            "bound": self.flow.bound,
            "on_stale": schedule.on_stale,
            "groups_per_step": schedule.groups_per_step,
            "group_size": schedule.group_size,
            "steps": schedule.steps,
            "resumed_from": self.flow.learner.batch if self.saved is not None else None,
        }

    async def _train(self) -> None:
        async with asyncio.TaskGroup() as loops:
            watch = loops.create_task(self._watch())
            engines = loops.create_task(self._start_fleet())
            await self.learners.start(self.model_path)
            await self._prepare_learner()
            await engines
            await self._publish(self.flow.learner)
            if self.saved is None:
                await self._evaluate(self.flow.learner.batch)
            self.stage = "training"
            self.usage.begin(await self.fleet.stats())
            if is_rl(self.recipe.algo):
                await self._reinforce()
            else:
                await self._imitate()
            if self._publishing is not None:
                await self._publishing
            await asyncio.gather(*self._evaluations)
            if not self._stopping:
                self.stage = "evaluating"
                await self._evaluate(self.flow.learner.batch)
            await self._checkpoint()
            watch.cancel()

    async def _start_fleet(self) -> None:
        await self.fleet.start(self.model_path, self.flow.learner)
        self._progressed()

    async def _prepare_learner(self) -> None:
        """Weights, optimizer and reference as they are to be before the first batch."""
        recipe = self.recipe
        steps = recipe.schedule.steps * recipe.algo.inner_steps
        if self.saved is not None:
            await self.learners.begin_phase(recipe.trainer.optimizer, steps)
            await self.learners.load(str(self.saved))
            return
        if recipe.warm_start is not None:
            await self._warm_start()
        await self.learners.begin_phase(recipe.trainer.optimizer, steps)
        if recipe.algo.kl.coefficient:
            await self.learners.set_reference()

    # ---- supervised steps

    async def _warm_start(self) -> None:
        warm = self.recipe.warm_start
        assert warm is not None
        self.stage = "warm start"
        await self.learners.begin_phase(warm.optimizer, warm.steps * self.recipe.algo.inner_steps)
        for self._warm_step in range(1, warm.steps + 1):
            metrics = await self.learners.train(self._demonstrations(warm.batch_size))
            self._progressed()
            if self._warm_step % 50 == 0 or self._warm_step == warm.steps:
                self.telemetry.event("warm_start", step=self._warm_step, loss=metrics["loss/ce"].value())

    def _demonstrations(self, count: int) -> Any:
        """The next ``count`` demonstrations of the source as a batch of cross-entropy."""
        entries: list[Encoded] = []
        while len(entries) < count and (entry := self.cursor.next()) is not None:
            entries.append(entry)
        triples = [(task.id, *self.encoder.demonstration(task)) for task, _ in entries]
        return assemble_demonstrations(triples, self.flow.learner, self.recipe.algo.minibatches)

    async def _imitate(self) -> None:
        """``algo.name: sft``: every step is a commit on ``groups_per_step`` demonstrations; engines serve evaluation only."""
        recipe = self.recipe
        while self.flow.learner.batch < recipe.schedule.steps and not self._stopping:
            started = time.perf_counter()
            batch = self._demonstrations(recipe.schedule.groups_per_step)
            samples = sum(map(len, batch.minibatches))
            if not samples:
                break
            metrics = await self.learners.train(batch)
            self.flow.ledger.dispatch(samples)
            self.flow.ledger.move(samples, "in_flight", "trained")
            self.flow.learner = self.flow.learner.next()
            times: Metrics = {"time/step": Mean(time.perf_counter() - started)}
            await self._committed(self.flow.learner, 0.0, {**metrics, **times})

    # ---- reinforcement

    async def _reinforce(self) -> None:
        async with asyncio.TaskGroup() as loops:
            dispatch = loops.create_task(self._dispatch(loops))
            await self._learn()
            self.flow.close()
            dispatch.cancel()
            for group in list(self._running):
                group.cancel()

    async def _dispatch(self, loops: asyncio.TaskGroup) -> None:
        """Fill free slots with the next tasks, no further than the remaining steps need."""
        for task, prompt_ids in self._interrupted():
            self._lease(loops, task, prompt_ids, again=True)
        while True:
            await self._until(lambda: True if self._room() > 0 else None, "a free slot")
            entry = self.cursor.next()
            if entry is None:
                self.flow.close()
                self._changed.set()
                return
            self._lease(loops, *entry)

    def _interrupted(self) -> list[Encoded]:
        """Tasks that were in flight at the checkpoint; they keep their ids."""
        return [self.cursor.at(epoch, position) for epoch, position in recovery.in_flight(self.saved)] if self.saved else []

    def _room(self) -> int:
        steps_left = self.recipe.schedule.steps - self.flow.learner.batch
        wanted = steps_left * self.flow.groups_per_step - self.flow.live - len(self.flow.training)
        return min(self.flow.free, wanted)

    def _lease(self, loops: asyncio.TaskGroup, task: Task, prompt_ids: tuple[int, ...], *, again: bool = False) -> None:
        size = self.recipe.schedule.group_size
        version = self.flow.redispatch(task.id, size) if again else self.flow.dispatch(task.id, size)
        self.places[task.id] = (task.epoch, task.position)
        self.telemetry.event("dispatch", group_id=task.id, version=str(version), samples=size, again=again)
        group = loops.create_task(self._group(task, prompt_ids, version))
        self._running.add(group)
        group.add_done_callback(self._running.discard)

    async def _group(self, task: Task, prompt_ids: tuple[int, ...], version: WeightVersion) -> None:
        """One group from lease to buffer.  A failed grader fails the group, with its reason; a dead engine fails the run."""
        size = self.recipe.schedule.group_size
        try:
            member = self.fleet.pick(version)
            group = await self.fleet.sample(member, task, prompt_ids, version, size)
        except GradingError as problem:
            self.flow.fail(task.id)
            self._gone("failed", task.id, size, str(problem))
        except GroupAborted:
            self.flow.abandon(task.id)
            self._gone("stale", task.id, size, "aborted: beyond the bound")
        else:
            self._arrived(group)
        del self.places[task.id]
        self._progressed()

    def _arrived(self, group: Group) -> None:
        rewards = [t.reward for t in group.trajectories]
        kl_in_reward = self.recipe.algo.kl.coefficient > 0 and self.recipe.algo.kl.placement == "reward"
        if kl_in_reward or has_signal(rewards, self.recipe.algo.name):  # type: ignore[arg-type]
            self._idle_groups = 0
            self.flow.finish(group)
            self.telemetry.event("ready", group_id=group.task.id, oldest=str(group.oldest))
            return
        self.flow.filter(group.task.id)
        self._gone("filtered", group.task.id, len(rewards), f"all rewards are {rewards[0]:g}")
        self._idle_groups += 1
        limit = self.recipe.schedule.max_idle_groups or 50 * self.flow.groups_per_step
        if self._idle_groups >= limit:
            raise RuntimeError(
                f"no learning signal: the last {self._idle_groups} groups each had equal rewards (the last one {rewards[0]:g} "
                "throughout). At 1 the task is solved: lower schedule.steps or take harder tasks; at 0 it is out of reach or the "
                "reward function does not fit the answers: see samples.jsonl"
            )

    def _gone(self, kind: str, group_id: str, samples: int, reason: str) -> None:
        self.telemetry.event(kind, group_id=group_id, samples=samples, reason=reason)

    async def _learn(self) -> None:
        """Take G groups, train on them, commit, publish; as often as the schedule says or the data lasts."""
        while self.flow.learner.batch < self.recipe.schedule.steps and not self._stopping:
            started = time.perf_counter()
            groups = await self._until(self._next_batch, "finished groups")
            if not groups:
                break
            waited = time.perf_counter() - started
            penalties = await self._kl_penalties(groups)
            queued = self._queue_metrics()
            assembled = assemble(groups, self.flow.learner, self.recipe, penalties)
            training = time.perf_counter()
            metrics = await self.learners.train(assembled.batch)
            version = self.flow.commit()
            now = time.perf_counter()
            self.telemetry.samples(assembled.records)
            self.telemetry.event("commit", batch=version.batch, version=str(version), groups=[g.task.id for g in groups])
            times: Metrics = {"time/step": Mean(now - started), "time/wait": Mean(waited), "time/train": Mean(now - training)}
            await self._committed(version, waited, {**assembled.metrics, **metrics, **queued, **times})

    def _next_batch(self) -> tuple[Group, ...] | None:
        """The next batch; an empty one when no more groups will come; None while there is reason to wait."""
        for group in self.flow.expire():
            self._gone("stale", group.task.id, len(group.trajectories), "beyond the bound in the buffer")
            self._changed.set()
        if self._stopping:
            return ()
        batch = self.flow.take()
        if batch is None and self.flow.exhausted:
            return ()
        return batch

    async def _kl_penalties(self, groups: tuple[Group, ...]) -> dict[str, float] | None:
        kl = self.recipe.algo.kl
        if not (kl.coefficient and kl.placement == "reward"):
            return None
        return kl_penalties(groups, await self.learners.reference_logprobs(samples_of(groups)))

    # ---- what follows every commit

    async def _committed(self, version: WeightVersion, waited_s: float, metrics: Metrics) -> None:
        """Record the step, keep a checkpoint if one is due, and send the weights on their way (one publication at a time)."""
        self._progressed()
        trained = metrics["time/train_tokens"].value()
        assert isinstance(trained, (int, float))
        usage = self.usage.step(await self.fleet.stats(), waited_s, trained)
        ledger: Metrics = {f"ledger/{k}": Last(n) for k, n in self.flow.ledger.as_dict().items()}
        self.telemetry.step(version.batch, {**metrics, **usage, **ledger, **self._publication_metrics()})
        every = self.recipe.checkpoint.every
        if every and version.batch % every == 0:
            await self._checkpoint()
        if self._publishing is not None:
            await self._publishing
        if is_rl(self.recipe.algo) or self._eval_due(version.batch) or version.batch == self.recipe.schedule.steps:
            self._publishing = asyncio.create_task(self._publish(version))

    def _eval_due(self, batch: int) -> bool:
        every = self.recipe.monitor.eval.every
        return bool(every) and batch > 0 and batch % every == 0 and batch < self.recipe.schedule.steps

    async def _publish(self, version: WeightVersion) -> None:
        publication = await self.fleet.publish(version, self.learners.buckets())
        self.publications.append(publication)
        self.flow.confirm(version)
        self.telemetry.event(
            "confirmed",
            version=str(version),
            publish_s=publication.publish_s,
            pause_s=publication.pause_s,
            bytes=publication.nbytes,
            staged_tokens=publication.staged_tokens,
        )
        self._progressed()
        if self.flow.on_stale == "drop":
            oldest = self.flow.learner.batch - self.flow.bound
            await self.fleet.abort_before(WeightVersion(version.attempt, max(oldest, 0)))
        if self._eval_due(version.batch):
            task = asyncio.create_task(self._evaluate(version.batch))
            self._evaluations.add(task)

    async def _evaluate(self, step: int) -> None:
        if not self.held_out:
            return

        async def sample(task: Task, prompt_ids: tuple[int, ...]) -> Group:
            member = self.fleet.pick(self.flow.confirmed)
            return await self.fleet.sample(member, task, prompt_ids, self.flow.confirmed, 1)

        tasks = [(recovery.evaluation_task(task, step), prompt_ids) for task, prompt_ids in self.held_out]
        concurrency = self.recipe.monitor.eval.concurrency
        result = await evaluate(sample, tasks, step=step, concurrency=concurrency, contain=(GradingError,))
        self.telemetry.evaluated(result)
        self._progressed()

    async def _checkpoint(self) -> None:
        await recovery.save(self)

    # ---- waiting, watching, showing

    def _progressed(self) -> None:
        self._last_progress = time.monotonic()
        self._changed.set()

    async def _until(self, ready: Callable[[], T | None], what: str) -> T:
        """Wait for the first value of ``ready`` that is not None; the watch bounds the wait."""
        while (value := ready()) is None:
            self._changed.clear()
            await self._changed.wait()
        return value

    async def _watch(self) -> None:
        """End the run when an actor is gone, or when nothing has moved for ``stall_timeout_s``."""
        limit = self.recipe.cluster.stall_timeout_s
        alive = asyncio.create_task(self.learners.check_health())
        while True:
            await asyncio.sleep(WATCH_S)
            await self.fleet.check_health()
            if alive.done():
                alive.result()
                alive = asyncio.create_task(self.learners.check_health())
            idle = time.monotonic() - self._last_progress
            if idle > limit:
                raise TimeoutError(
                    f"nothing has moved for {idle:.0f} s (cluster.stall_timeout_s = {limit:g}) while {self.stage}: "
                    f"{len(self.flow.in_flight)} groups in flight, {len(self.flow.ready)} ready, "
                    f"{len(self.flow.training)} with the learner, engines confirmed {self.flow.confirmed} of {self.flow.learner}"
                )

    def stop(self) -> None:
        """Finish the step at hand, keep a checkpoint, and end."""
        self._stopping = True
        self._changed.set()

    def _queue_metrics(self) -> Metrics:
        """Lag so far of what is still on its way: a batch taken now would find it this stale."""
        flights = [self.flow.lag(f.version) for f in self.flow.in_flight.values()]
        queued = [self.flow.lag(group.oldest) for group, _ in self.flow.ready.values()]
        return {
            "staleness/in_flight_mean": Mean(sum(flights) / max(len(flights), 1), len(flights)),
            "staleness/queued_mean": Mean(sum(queued) / max(len(queued), 1), len(queued)),
            "staleness/dropped_total": Sum(self.flow.ledger.counts["stale"]),
        }

    def _publication_metrics(self) -> Metrics:
        if not self.publications:
            return {}
        last = self.publications[-1]
        return {
            "weights/publish_s": Mean(last.publish_s),
            "weights/pause_s": Mean(last.pause_s),
            "weights/bytes": Last(last.nbytes),
            "weights/staged_tokens": Mean(last.staged_tokens),
        }

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
            publishes=len(self.publications),
            resumes=self.flow.learner.attempt,
        )

    def snapshot(self) -> dict[str, Any]:
        """What the live display shows."""
        return {
            "stage": self.stage,
            "warm_step": self._warm_step,
            "step": self.flow.learner.batch,
            "version": str(self.flow.learner),
            "confirmed": str(self.flow.confirmed),
            "in_flight": len(self.flow.in_flight),
            "ready": len(self.flow.ready),
            "slots": self.flow.slots,
            "ledger": self.flow.ledger.as_dict(),
            "metrics": self.telemetry.latest,
            "evaluations": [e.as_dict() for e in self.telemetry.evaluations],
            "wall_s": time.time() - self.telemetry.started,
        }


def describe(problem: BaseException) -> str:
    """The innermost cause of a failure in one line: TaskGroup and Ray both wrap it."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    if isinstance(problem, ray.exceptions.RayTaskError):
        problem = problem.cause if isinstance(getattr(problem, "cause", None), BaseException) else problem
    return f"{type(problem).__name__}: {problem}"
