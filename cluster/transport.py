"""How a version gets from the learner into every engine: one class per transport of ``rollout.weights``."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from slipstream.cluster.fleet import Fleet, gpus_wanted
from slipstream.cluster.learners import LearnerGroup
from slipstream.core.records import WeightVersion
from slipstream.core.schema import Recipe
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

    async def publish(self, version: WeightVersion) -> Publication: ...


def transport_name(recipe: Recipe) -> TransportName:
    """What this cluster can do for this recipe."""
    return choose_transport(gpus=int(ray.cluster_resources().get("GPU", 0)), wanted=gpus_wanted(recipe))


def open_transport(name: TransportName, fleet: Fleet, learners: LearnerGroup, timeout_s: float) -> Transport:
    """``timeout_s`` bounds every step of a publication."""
    kinds: dict[str, type[Mapped] | type[Nccl] | type[PlainIpc]] = {"mapped": Mapped, "nccl": Nccl, "plain_ipc": PlainIpc}
    return kinds[name](fleet, learners, timeout_s)


class Mapped:
    """Through Ray's object store into each node's shared memory, while the engines generate; then a short commit."""

    def __init__(self, fleet: Fleet, learners: LearnerGroup, timeout_s: float) -> None:
        self._fleet = fleet
        self._learners = learners
        self._timeout_s = timeout_s

    async def connect(self) -> None:
        pass

    async def publish(self, version: WeightVersion) -> Publication:
        start = time.perf_counter()
        label, nbytes, count = str(version), 0, 0
        hosts = self._fleet.hosts()
        before = await self._fleet.sampled_tokens()
        async for reference in self._learners.buckets():
            bucket, data, crc32 = await reference
            staging = (host.actor.stage.remote(label, bucket, data, crc32) for host in hosts)
            await asyncio.wait_for(asyncio.gather(*staging), self._timeout_s)
            nbytes += bucket.nbytes
            count += 1
        staged = await asyncio.gather(*(host.actor.complete.remote(label, count) for host in hosts))
        staged_tokens = await self._fleet.sampled_tokens() - before
        updates = {host.node: mapped_update(s) for host, s in zip(hosts, staged, strict=True)}
        pause_s = await asyncio.wait_for(self._fleet.commit(version, lambda m: updates[m.node]), self._timeout_s)
        await asyncio.gather(*(host.actor.discard.remote(label) for host in hosts))
        return Publication(version, nbytes, time.perf_counter() - start, pause_s, staged_tokens)


class Nccl:
    """vLLM's packed NCCL broadcast from rank 0; the engines pause for the whole transfer."""

    def __init__(self, fleet: Fleet, learners: LearnerGroup, timeout_s: float) -> None:
        self._fleet = fleet
        self._learners = learners
        self._timeout_s = timeout_s

    async def connect(self) -> None:
        """Rank 0 of the group is the learner's; engine i brings its workers from rank 1 + i · tensor_parallel on."""
        workers = self._fleet.recipe.rollout.tensor_parallel
        address = await self._learners.address()
        info: dict[str, Any] = {
            "master_address": address[0],
            "master_port": address[1],
            "world_size": 1 + workers * len(self._fleet.members),
            "packed": True,
        }
        meeting = [m.actor.connect.remote({**info, "rank_offset": 1 + m.index * workers}) for m in self._fleet.members]
        both = asyncio.gather(self._learners.nccl_connect(address, info["world_size"]), *meeting)
        await asyncio.wait_for(both, self._timeout_s)

    async def publish(self, version: WeightVersion) -> Publication:
        start = time.perf_counter()
        specs = await self._learners.engine_specs()
        update = nccl_update(specs)
        both = asyncio.gather(self._fleet.commit(version, lambda _: update), self._learners.nccl_broadcast())
        pause_s, _ = await asyncio.wait_for(both, self._timeout_s)
        return Publication(version, sum(s.nbytes for s in specs), time.perf_counter() - start, pause_s, 0)


class PlainIpc:
    """The engines copy out of the learner's memory on the GPU that they share."""

    def __init__(self, fleet: Fleet, learners: LearnerGroup, timeout_s: float) -> None:
        self._fleet = fleet
        self._learners = learners
        self._timeout_s = timeout_s

    async def connect(self) -> None:
        pass

    async def publish(self, version: WeightVersion) -> Publication:
        start = time.perf_counter()
        specs = await self._learners.engine_specs()
        update = ipc_update([s.name for s in specs], await self._learners.ipc_export())
        pause_s = await asyncio.wait_for(self._fleet.commit(version, lambda _: update), self._timeout_s)
        await self._learners.ipc_release()
        return Publication(version, sum(s.nbytes for s in specs), time.perf_counter() - start, pause_s, 0)
