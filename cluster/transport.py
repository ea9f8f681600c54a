"""How a version gets from the learner into every engine: one class per transport of ``rollout.weights``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from slipstream.cluster.fleet import Fleet, Member, gpus_wanted
from slipstream.cluster.learners import LearnerGroup
from slipstream.core.records import WeightVersion
from slipstream.core.schema import Recipe
from slipstream.core.weights import TensorSpec
from slipstream.rollout.weights import TransportName, choose_transport, ipc_update, mapped_update, nccl_update


@dataclass(frozen=True, slots=True)
class Publication:
    """How one version reached every engine.

    ``publish_s`` is the whole way in seconds, ``pause_s`` the longest that an engine generated nothing, ``staged_tokens`` what
    the engines sampled while buckets were being staged.
    """

    version: WeightVersion
    nbytes: int
    publish_s: float
    pause_s: float
    staged_tokens: int


class Transport(Protocol):
    async def connect(self) -> None:
        """Once, when engines and learner are up."""
        ...

    def export(self) -> Any:
        """Ask the learner for its weights as they are now.  Submits at once: nothing may come between a commit and this."""
        ...

    async def send(self, version: WeightVersion, exported: Any) -> Publication:
        """Bring what ``export`` asked for into every engine, as ``version``."""
        ...


def transport_name(recipe: Recipe) -> TransportName:
    """What this cluster can do for this recipe."""
    return choose_transport(gpus=int(ray.cluster_resources().get("GPU", 0)), wanted=gpus_wanted(recipe))


def open_transport(name: TransportName, fleet: Fleet, learners: LearnerGroup) -> Transport:
    """The transport of that name between these ends."""
    kinds: dict[str, type[Mapped] | type[Nccl] | type[PlainIpc]] = {"mapped": Mapped, "nccl": Nccl, "plain_ipc": PlainIpc}
    return kinds[name](fleet, learners)


@dataclass(slots=True)
class Ends:
    """What every transport joins; it waits through their methods only, which ``cluster.step_timeout_s`` bounds."""

    fleet: Fleet
    learners: LearnerGroup

    async def connect(self) -> None:
        pass


class Mapped(Ends):
    """Through Ray's object store into each node's shared memory, while the engines generate; then a short commit."""

    def export(self) -> Any:
        return self.learners.export()

    async def send(self, version: WeightVersion, exported: Any) -> Publication:
        start = time.perf_counter()
        label, nbytes, count = str(version), 0, 0
        hosts = self.fleet.hosts()
        before = await self.fleet.sampled_tokens()
        async for reference in self.learners.buckets(exported):
            nbytes += await self._stage(label, reference, hosts)
            count += 1
        staged = await self.fleet.each(f"completing {label}", lambda m: m.actor.complete.remote(label, count), hosts)
        staged_tokens = await self.fleet.sampled_tokens() - before
        updates = {host.node: mapped_update(s) for host, s in zip(hosts, staged, strict=True)}
        pause_s = await self.fleet.commit(version, lambda m: updates[m.node])
        await self.fleet.each(f"discarding {label}", lambda m: m.actor.discard.remote(label), hosts)
        return Publication(version, nbytes, time.perf_counter() - start, pause_s, staged_tokens)

    async def _stage(self, label: str, reference: Any, hosts: Sequence[Member]) -> int:
        """Bring one bucket to every host; its size in bytes."""
        ((bucket, data, crc32),) = await self.learners.results(f"a bucket of {label}", [reference])
        await self.fleet.each(f"staging {label}", lambda m: m.actor.stage.remote(label, bucket, data, crc32), hosts)
        return int(bucket.nbytes)


class Nccl(Ends):
    """vLLM's packed NCCL broadcast from rank 0; the engines pause for the whole transfer."""

    specs: list[TensorSpec]

    async def connect(self) -> None:
        """Rank 0 of the group is the learner's; engine i brings its workers from rank 1 + i · tensor_parallel on."""
        self.specs = await self.learners.engine_specs()
        workers = self.fleet.recipe.rollout.tensor_parallel
        address = await self.learners.address()
        info: dict[str, Any] = {
            "master_address": address[0],
            "master_port": address[1],
            "world_size": 1 + workers * len(self.fleet.members),
            "packed": True,
        }
        meeting = self.fleet.each(
            "meeting the learner", lambda m: m.actor.connect.remote({**info, "rank_offset": 1 + m.index * workers})
        )
        await asyncio.gather(self.learners.nccl_connect(address, info["world_size"]), meeting)

    def export(self) -> Any:
        """The broadcast begins when the engines have paused for it; until then the learner waits."""
        return self.learners.submit("nccl_broadcast")

    async def send(self, version: WeightVersion, exported: Any) -> Publication:
        start = time.perf_counter()
        update = nccl_update(self.specs)
        broadcast = self.learners.results(f"broadcast of {version}", exported)
        pause_s, _ = await asyncio.gather(self.fleet.commit(version, lambda _: update), broadcast)
        return Publication(version, sum(s.nbytes for s in self.specs), time.perf_counter() - start, pause_s, 0)


class PlainIpc(Ends):
    """The engines copy out of a copy of the learner's weights on the GPU that they share."""

    specs: list[TensorSpec]

    async def connect(self) -> None:
        self.specs = await self.learners.engine_specs()

    def export(self) -> Any:
        return self.learners.submit("ipc_export")

    async def send(self, version: WeightVersion, exported: Any) -> Publication:
        start = time.perf_counter()
        handles, *_ = await self.learners.results(f"export of {version}", exported)
        update = ipc_update([s.name for s in self.specs], handles)
        pause_s = await self.fleet.commit(version, lambda _: update)
        await self.learners.ipc_release()
        return Publication(version, sum(s.nbytes for s in self.specs), time.perf_counter() - start, pause_s, 0)
