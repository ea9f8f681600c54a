"""Groups of siblings: sample them side by side, decode, grade."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from slipstream.core.records import Group, Task, Trajectory, WeightVersion
from slipstream.rollout.environment import SingleTurn, rollout
from slipstream.rollout.rewards import Rewards

if TYPE_CHECKING:
    from slipstream.rollout.engine import Engine


class GroupAborted(RuntimeError):
    """The group was called off, since none of its tokens could have been trained any more."""


class GroupSampler:
    """Turns tasks into graded groups on one engine.  ``seed`` is the run's; see ``sample_seed``."""

    def __init__(
        self,
        engine: Engine,
        decode: Callable[[Sequence[int]], str],
        rewards: Rewards,
        *,
        seed: int | None,
        max_tokens: int,
        max_length: int,
    ) -> None:
        self._engine = engine
        self._decode = decode
        self._rewards = rewards
        self._seed = seed
        self._max_tokens = max_tokens
        self._max_length = max_length
        self._running: dict[str, tuple[asyncio.Task[list[Trajectory]], tuple[str, ...]]] = {}
        self._aborted: set[str] = set()

    async def sample(self, task: Task, prompt_ids: tuple[int, ...], dispatched: WeightVersion, size: int) -> Group:
        """``size`` graded siblings of ``task``.

        Raises GradingError if the grader fails, EngineFailed if the engine does, GroupAborted after ``abort_before``.
        """
        sample_ids = tuple(f"{task.id}#{i}" for i in range(size))
        siblings = asyncio.ensure_future(self._siblings(prompt_ids, sample_ids))
        self._running[task.id] = (siblings, sample_ids)
        try:
            trajectories = await siblings
        except asyncio.CancelledError:
            if task.id in self._aborted:
                raise GroupAborted(task.id) from None
            siblings.cancel()
            raise
        finally:
            del self._running[task.id]
            self._aborted.discard(task.id)
        graded = await self._rewards.grade(task, trajectories)
        return Group(task=task, dispatched=dispatched, trajectories=tuple(graded))

    async def _siblings(self, prompt_ids: tuple[int, ...], sample_ids: Sequence[str]) -> list[Trajectory]:
        async with asyncio.TaskGroup() as siblings:
            tasks = [siblings.create_task(self._one(prompt_ids, sample_id)) for sample_id in sample_ids]
        return [task.result() for task in tasks]

    async def _one(self, prompt_ids: tuple[int, ...], sample_id: str) -> Trajectory:
        return await rollout(
            SingleTurn(prompt_ids),
            self._engine,
            sample_id=sample_id,
            seed=None if self._seed is None else sample_seed(self._seed, sample_id),
            max_tokens=self._max_tokens,
            max_length=self._max_length,
            decode=self._decode,
        )

    def abort_before(self, oldest: WeightVersion) -> None:
        """Call off the running groups that have a request admitted before ``oldest``."""
        for group_id, (siblings, sample_ids) in self._running.items():
            admitted = (self._engine.admitted.get(sample_id) for sample_id in sample_ids)
            if any(version is not None and version < oldest for version in admitted):
                self._aborted.add(group_id)
                siblings.cancel()


def sample_seed(seed: int, sample_id: str) -> int:
    """A random stream of its own for every sample, the same in every run with this seed: 63 bits of BLAKE2."""
    return int.from_bytes(blake2b(f"{seed}/{sample_id}".encode(), digest_size=8).digest(), "little") >> 1
