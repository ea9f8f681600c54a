"""Groups of siblings: sample them side by side, decode, grade."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

from slipstream.core.records import Group, Task, Trajectory, WeightVersion
from slipstream.rollout.environment import Completion, Episode, Limits, Observation
from slipstream.rollout.environments import Environments, score
from slipstream.rollout.failures import GroupFailed
from slipstream.rollout.prompts import PromptEncoder
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
        encoder: PromptEncoder,
        environments: Environments,
        rewards: Rewards,
        *,
        seed: int | None,
        limits: Limits,
    ) -> None:
        self._engine = engine
        self._encoder = encoder
        self._environments = environments
        self._rewards = rewards
        self._seed = seed
        self._limits = limits
        self._running: dict[str, tuple[asyncio.Task[list[Trajectory]], list[Episode]]] = {}
        self._aborted: set[str] = set()

    async def sample(self, task: Task, prompt_ids: tuple[int, ...], dispatched: WeightVersion, size: int) -> Group:
        """``size`` graded siblings of ``task``.

        Raises GroupFailed if an environment or the grader fails, EngineFailed if the engine does, GroupAborted after
        ``abort_before``.
        """
        episodes: list[Episode] = []
        siblings = asyncio.ensure_future(self._siblings(task, prompt_ids, size, episodes))
        self._running[task.id] = (siblings, episodes)
        try:
            trajectories = await siblings
        except asyncio.CancelledError:
            if task.id in self._aborted:
                raise GroupAborted(task.id) from None
            siblings.cancel()
            raise
        finally:
            self._running.pop(task.id, None)
            self._aborted.discard(task.id)
        graded = await self._rewards.grade(task, trajectories)
        return Group(task=task, dispatched=dispatched, trajectories=tuple(graded))

    async def _siblings(self, task: Task, prompt_ids: tuple[int, ...], size: int, episodes: list[Episode]) -> list[Trajectory]:
        try:
            async with asyncio.TaskGroup() as siblings:
                tasks = [siblings.create_task(self._one(task, prompt_ids, i, episodes)) for i in range(size)]
        except ExceptionGroup as problems:
            failed, worse = problems.split(GroupFailed)  # a dead engine ends the run, whatever an environment did meanwhile
            raise (worse or failed or problems).exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, task: Task, prompt_ids: tuple[int, ...], sibling: int, episodes: list[Episode]) -> Trajectory:
        sample_id = f"{task.id}#{sibling}"
        environment = self._environments.open(task)

        async def observe(completion: Completion) -> Observation:
            return await self._environments.observe(environment, completion)

        episode = Episode(
            self._engine,
            prompt_ids,
            sample_id=sample_id,
            seed=None if self._seed is None else sample_seed(self._seed, sample_id),
            limits=self._limits,
            observe=observe,
            encode=partial(self._encoder.observation, task),
            decode=self._encoder.decode,
        )
        episodes.append(episode)
        return replace(await episode.run(), rewards=score(environment))

    def abort_before(self, oldest: WeightVersion, group_ids: Iterable[str]) -> None:
        """Call off those of the groups that run here and have a turn, over or under way, admitted before ``oldest``."""
        for group_id in self._running.keys() & set(group_ids):
            siblings, episodes = self._running[group_id]
            begun = (episode.oldest or self._engine.admitted.get(episode.sample_id) for episode in episodes)
            if any(version is not None and version < oldest for version in begun):
                self._aborted.add(group_id)
                siblings.cancel()


def sample_seed(seed: int, sample_id: str) -> int:
    """A random stream of its own for every sample, the same in every run with this seed: 63 bits of BLAKE2."""
    return int.from_bytes(blake2b(f"{seed}/{sample_id}".encode(), digest_size=8).digest(), "little") >> 1
