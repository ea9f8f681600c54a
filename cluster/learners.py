"""The ranks of the learner as one: every call goes to all ranks, and the first failure of any is the failure of the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray

from slipstream.cluster.actors import LearnerActor, RunPlace, spawn, starting
from slipstream.cluster.fleet import gpu_share
from slipstream.cluster.waiting import within
from slipstream.core.metrics import Metrics
from slipstream.core.records import TrainBatch, TrainSample
from slipstream.core.schema import Optimizer, Recipe
from slipstream.core.weights import TensorSpec


@dataclass(slots=True)
class LearnerGroup:
    recipe: Recipe
    place: RunPlace
    ranks: list[Any] = field(default_factory=list)
    busy: int = 0
    """Calls under way; each has a time limit of its own."""

    async def start(self, model_path: Path) -> None:
        """Bring all ranks up; they meet at rank 0's address.  Raises TimeoutError after ``cluster.start_timeout_s``."""
        recipe = self.recipe
        gpus = gpu_share(recipe)
        self.ranks = spawn(LearnerActor, recipe.trainer.ranks, cpus=recipe.cluster.learner_cpus, gpus=gpus)
        async with starting("the learner", "logs/learner-*.log", recipe.cluster.start_timeout_s):
            address = await self.ranks[0].address.remote()
            starts = (
                actor.start.remote(recipe, model_path, rank, self.place, address) for rank, actor in enumerate(self.ranks)
            )
            await asyncio.gather(*starts)

    async def begin_phase(self, optimizer: Optimizer, total_steps: int, epochs: int | None = None) -> None:
        """A fresh optimizer; ``epochs`` passes over each batch, those of the recipe where None."""
        await self._all("begin_phase", optimizer, total_steps, epochs)

    async def set_reference(self, path: Path | None) -> None:
        await self._all("set_reference", path)

    async def train(self, batch: TrainBatch) -> Metrics:
        """One batch on every rank; rank 0's metrics are those of all ranks."""
        return (await self._all("train", ray.put(batch)))[0]

    async def set_critic(self, path: Path | None) -> None:
        await self._all("set_critic", path)

    async def set_teacher(self, path: Path) -> None:
        await self._all("set_teacher", path)

    async def logprobs(self, samples: list[TrainSample], which: Literal["reference", "teacher"]) -> list[list[float]]:
        """Of every response token, under a frozen model."""
        return (await self._all("logprobs", ray.put(samples), which))[0]

    def export(self) -> list[Any]:
        """Submit a publication to every rank: it holds the weights as of the calls before it.  For ``buckets``."""
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": 2}
        return [rank.publish.options(**options).remote() for rank in self.ranks]

    async def buckets(self, exported: list[Any]) -> AsyncIterator[Any]:
        """References to (bucket, bytes, checksum), as rank 0 gathers them; two wait in the object store at most."""
        while (reference := await self._next_bucket(exported[0])) is not None:
            yield reference
        for stream in exported[1:]:
            assert await self._next_bucket(stream) is None, "a rank other than 0 published weights"

    async def _next_bucket(self, stream: Any) -> Any | None:
        try:
            return await within(self._limit_s, "learner: the next bucket of weights", anext(stream))
        except StopAsyncIteration:
            return None

    async def address(self) -> tuple[str, int]:
        """A free port on rank 0's node."""
        return (await self.results("address", [self.ranks[0].address.remote()]))[0]

    async def nccl_connect(self, address: tuple[str, int], world_size: int) -> None:
        """Rank 0 waits for the engines at ``address`` (see ``LearnerActor.address``)."""
        await self.results("nccl_connect", [self.ranks[0].nccl_connect.remote(address, world_size)])

    async def engine_specs(self) -> list[TensorSpec]:
        return (await self.results("engine_specs", [self.ranks[0].engine_specs.remote()]))[0]

    def submit(self, method: str) -> list[Any]:
        """Call ``method`` of every rank, for ``results``: it sees the learner as the calls before it left it."""
        return [getattr(rank, method).remote() for rank in self.ranks]

    async def ipc_release(self) -> None:
        await self._all("ipc_release")

    async def save(self, folder: str) -> None:
        await self._all("save", folder)

    async def load(self, folder: str, total_steps: int) -> None:
        """Go on from a checkpoint, with a schedule that now ends at ``total_steps`` optimizer steps."""
        await self._all("load", folder, total_steps)

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        return await self.results(method, [getattr(rank, method).remote(*arguments) for rank in self.ranks])

    async def results(self, what: str, calls: Sequence[Any]) -> list[Any]:
        """Of calls that have been submitted.  Raises TimeoutError, naming ``what``, after ``cluster.step_timeout_s``."""
        self.busy += 1
        try:
            return list(await within(self._limit_s, f"learner: {what}", asyncio.gather(*calls)))
        finally:
            self.busy -= 1

    @property
    def _limit_s(self) -> float:
        return self.recipe.cluster.step_timeout_s

    async def check_health(self) -> None:
        """Raises ActorDiedError if a rank's process is gone.  A rank answers between two steps only, so no time limit here."""
        await asyncio.gather(*(rank.pid.remote() for rank in self.ranks))

    def stop(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)
