"""Held-out evaluation: requests of their own, outside the ledger, with the versions that answered them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.core.records import Group, Task


@dataclass(frozen=True, slots=True)
class EvalResult:
    """``score`` is the mean reward over ``n`` answers; where every reward is 0 or 1 the metric is called accuracy.

    ``versions`` counts answered tokens by policy version: one entry, unless weights arrived meanwhile.
    """

    step: int
    score: float
    n: int
    failed: int
    metric: str
    seconds: float
    versions: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def evaluate(
    sample: Callable[[Task, tuple[int, ...]], Awaitable[Group]],
    tasks: Sequence[tuple[Task, tuple[int, ...]]],
    *,
    step: int,
    concurrency: int,
    contain: tuple[type[BaseException], ...],
) -> EvalResult:
    """Answer each task once, ``concurrency`` at a time.  Failures of the kinds in ``contain`` are counted, others raised."""
    gate = asyncio.Semaphore(concurrency)
    start = time.perf_counter()

    async def one(task: Task, prompt_ids: tuple[int, ...]) -> Group | None:
        async with gate:
            try:
                return await sample(task, prompt_ids)
            except contain:
                return None

    groups = await asyncio.gather(*(one(task, prompt_ids) for task, prompt_ids in tasks))
    answers = [t for group in groups if group is not None for t in group.trajectories]
    rewards = [t.reward for t in answers]
    versions = Counter(str(v) for t in answers for v in t.policy_versions)
    return EvalResult(
        step=step,
        score=sum(rewards) / len(rewards) if rewards else 0.0,
        n=len(rewards),
        failed=len(tasks) - len(answers),
        metric="accuracy" if set(rewards) <= {0.0, 1.0} else "reward",
        seconds=time.perf_counter() - start,
        versions=dict(sorted(versions.items())),
    )
