"""The engines of a run: who is free, and how new weights reach all of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import ray

from slipstream.cluster.actors import EngineStats, RolloutActor, RunPlace, spawn, starting
from slipstream.cluster.waiting import within
from slipstream.core.mistakes import UserError
from slipstream.core.records import Group, Task, WeightVersion
from slipstream.core.schema import Recipe
from slipstream.rollout.weights import TransportName

T = TypeVar("T")

HEALTH_S = 60.0
"""So soon an engine answers a health check, however much it has to do."""


@dataclass(slots=True)
class Member:
    """One engine as the controller knows it."""

    index: int
    actor: Any
    node: str
    version: WeightVersion
    groups: int = 0


@dataclass(slots=True)
class Fleet:
    """Starts engines, and hands groups to the least loaded one that holds the newest confirmed version."""

    recipe: Recipe
    place: RunPlace
    members: list[Member] = field(default_factory=list)
    actors: list[Any] = field(default_factory=list)

    async def start(
        self,
        model_path: Path,
        version: WeightVersion,
        first_task: Task,
        transport: TransportName,
        draft_path: Path | None = None,
        draft_states: Sequence[Path] = (),
    ) -> None:
        """Bring all engines and graders up side by side.  Raises TimeoutError after ``cluster.start_timeout_s``.

        ``draft_states`` are those of ``save_drafts``; engines take them in turn, so there may be more engines than states.
        """
        recipe = self.recipe
        gpus = recipe.rollout.tensor_parallel * gpu_share(recipe)
        self.actors = spawn(RolloutActor, recipe.rollout.engines, cpus=recipe.cluster.engine_cpus, gpus=gpus)
        async with starting("an engine", "logs/engine-*.log", recipe.cluster.start_timeout_s):
            states = itertools.cycle(draft_states or [None])
            starts = (
                actor.start.remote(recipe, model_path, i, self.place, version, first_task, transport, draft_path, state)
                for i, (actor, state) in enumerate(zip(self.actors, states, strict=False))
            )
            nodes = await asyncio.gather(*starts)
        self.members = [Member(i, a, n, version) for i, (a, n) in enumerate(zip(self.actors, nodes, strict=True))]

    def pick(self, confirmed: WeightVersion) -> Member:
        """The engine with the fewest groups among those that hold ``confirmed`` or newer."""
        return min((m for m in self.members if m.version >= confirmed), key=lambda m: (m.groups, m.index))

    async def sample(
        self, member: Member, task: Task, prompt_ids: tuple[int, ...], dispatched: WeightVersion, size: int
    ) -> Group:
        """A graded group.  Bounded by the caller's ``watch``: how long a group may take depends on all the others."""
        member.groups += 1
        try:
            return await member.actor.sample.remote(task, prompt_ids, dispatched, size)
        finally:
            member.groups -= 1

    async def commit(self, version: WeightVersion, update_at: Callable[[Member], Any]) -> float:
        """Put ``version`` into every engine side by side; the longest pause of any of them, in seconds."""

        async def one(member: Member) -> float:
            times = await member.actor.commit.remote(version, update_at(member))
            member.version = version
            return times.pause_s

        return max(await self.each(f"commit of {version}", one))

    async def each(self, what: str, call: Callable[[Member], Awaitable[T]], members: Sequence[Member] | None = None) -> list[T]:
        """``call`` of all engines (or of ``members``) side by side.

        Raises TimeoutError, naming the engine and ``what``, after ``cluster.step_timeout_s``.
        """
        limit_s, asked = self.recipe.cluster.step_timeout_s, self.members if members is None else members
        return list(await asyncio.gather(*(within(limit_s, f"engine {m.index}: {what}", call(m)) for m in asked)))

    def hosts(self) -> list[Member]:
        """One engine per node."""
        return list({member.node: member for member in reversed(self.members)}.values())

    async def abort_before(self, oldest: WeightVersion, group_ids: list[str]) -> None:
        """Call off those of the groups that began before ``oldest``."""
        await self.each("calling groups off", lambda m: m.actor.abort_before.remote(oldest, group_ids))

    async def stats(self) -> list[EngineStats]:
        return await self.each("reading its counters", lambda m: m.actor.stats.remote())

    async def save_drafts(self, folder: Path) -> dict[str, Path]:
        """Write down every engine's draft; the folder of each, by the name of who wrote it."""
        folders = {m.index: folder / f"engine-{m.index}" for m in self.members}
        await self.each("saving its draft", lambda m: m.actor.save_draft.remote(folders[m.index]))
        return {f"engine {index}": written for index, written in folders.items()}

    async def share_drafts(self) -> None:
        """Let every engine's draft go on from the average of all; the weights travel between the engines' actors alone."""
        shares = [member.actor.lend_draft.remote() for member in self.members]
        average = self.members[0].actor.average_drafts.remote(*shares)
        await self.each("sharing its draft", lambda m: m.actor.adopt_draft.remote(average))

    async def sampled_tokens(self) -> int:
        return sum(s.sampled_tokens for s in await self.stats())

    async def check_health(self) -> None:
        """Raises EngineFailed or ActorDiedError if an engine is gone, TimeoutError if one does not answer in a minute."""
        asked = ((f"engine {m.index}: answering a health check", m.actor.check_health.remote()) for m in self.members)
        await asyncio.gather(*(within(HEALTH_S, what, check, key=None) for what, check in asked))

    async def stop(self) -> None:
        """End every engine in order, also one that is still starting; one that does not answer in ten seconds is killed."""
        if self.actors:
            await asyncio.wait([asyncio.ensure_future(actor.stop.remote()) for actor in self.actors], timeout=10.0)
        for actor in self.actors:
            ray.kill(actor)


def gpus_wanted(recipe: Recipe) -> int:
    """One for every worker of every engine, and one for every rank."""
    return recipe.rollout.engines * recipe.rollout.tensor_parallel + recipe.trainer.ranks


def gpu_share(recipe: Recipe) -> float:
    """GPUs per engine worker or rank: none, one each, or equal parts of those that there are when they are too few.

    Raises UserError where workers of one engine would have to share a GPU.
    """
    share = min(1.0, ray.cluster_resources().get("GPU", 0.0) / gpus_wanted(recipe))
    if 0.0 < share < 1.0 and recipe.rollout.tensor_parallel > 1:
        raise UserError(
            f"rollout.tensor_parallel: got {recipe.rollout.tensor_parallel}, but there are too few GPUs for one each "
            f"({gpus_wanted(recipe)} wanted); lower it, rollout.engines or trainer.ranks"
        )
    return share
