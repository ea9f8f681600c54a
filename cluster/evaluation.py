"""Held-out evaluation: requests of their own, outside the ledger, with the versions that answered them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import stdev
from typing import TYPE_CHECKING, Any

from slipstream.core.records import Group, Task, Trajectory
from slipstream.core.schema import Evaluation
from slipstream.rollout.failures import GroupFailed

if TYPE_CHECKING:
    from slipstream.cluster.fleet import Fleet
    from slipstream.cluster.flow import Flow
    from slipstream.cluster.telemetry import Telemetry

Encoded = tuple[Task, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """``score`` is the mean reward over ``n`` answers; where every reward is 0 or 1 the metric is called accuracy.

    ``failed`` answers could not be sampled or graded, and do not count.  ``versions`` counts answered tokens by policy version:
    one entry, unless weights arrived meanwhile.
    """

    step: int
    score: float
    n: int
    failed: int
    metric: str
    seconds: float
    versions: dict[str, int]
    standard_error: float | None = None
    """Of the score; None for fewer than two answers."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> EvalResult:
        """From an ``eval`` event, which has more fields, and in old runs no standard error."""
        return cls(**{field.name: event[field.name] for field in fields(cls) if field.name in event})


class Evaluator:
    """Asks every held-out task once per evaluation, ``monitor.eval.concurrency`` at a time, beside the training rollouts."""

    def __init__(
        self,
        evaluation: Evaluation,
        tasks: Sequence[Encoded],
        fleet: Fleet,
        flow: Flow,
        telemetry: Telemetry,
        answered: Callable[[], None],
    ) -> None:
        """``answered`` is called after every answer: an evaluation may take longer than anything else of a run."""
        self._every = evaluation.every
        self._gate = asyncio.Semaphore(evaluation.concurrency)
        self._tasks = tasks
        self._fleet = fleet
        self._flow = flow
        self._telemetry = telemetry
        self._answered = answered
        self._running: list[asyncio.Task[None]] = []

    def due(self, step: int) -> bool:
        """Whether an evaluation belongs between two steps here; before and after the training there is one in any case."""
        return bool(self._tasks and self._every and step > 0 and step % self._every == 0)

    def start(self, step: int, loops: asyncio.TaskGroup) -> None:
        """Evaluate in the background; a failure is at once that of ``loops``."""
        self._running.append(loops.create_task(self.run(step)))

    async def finish(self) -> None:
        """Wait for the evaluations under way.  Raises what made one fail."""
        for running in self._running:
            await running
        self._running.clear()

    def cancel(self) -> None:
        for running in self._running:
            running.cancel()

    async def run(self, step: int) -> None:
        if not self._tasks:
            return
        start = time.perf_counter()
        answers = await asyncio.gather(*(self._answer(replace(task, id=f"{task.id}@{step}"), ids) for task, ids in self._tasks))
        graded = [answer for answer in answers if answer is not None]
        self._telemetry.evaluated(score(graded, step, len(answers) - len(graded), time.perf_counter() - start))

    async def _answer(self, task: Task, prompt_ids: tuple[int, ...]) -> Trajectory | None:
        """One graded answer, under an id that is this evaluation's own; None if it could not be sampled or graded."""
        async with self._gate:
            version = self._flow.confirmed
            try:
                member = self._fleet.pick(version)
                group: Group = await self._fleet.sample(member, task, prompt_ids, version, 1)
            except GroupFailed:
                return None
            finally:
                self._answered()
        return group.trajectories[0]


def score(answers: Sequence[Trajectory], step: int, failed: int, seconds: float) -> EvalResult:
    rewards = [answer.reward for answer in answers]
    return EvalResult(
        step=step,
        score=sum(rewards) / len(rewards) if rewards else 0.0,
        n=len(rewards),
        failed=failed,
        metric="accuracy" if set(rewards) <= {0.0, 1.0} else "reward",
        seconds=seconds,
        versions=dict(sorted(Counter(str(v) for answer in answers for v in answer.policy_versions).items())),
        standard_error=stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else None,
    )
