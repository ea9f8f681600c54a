"""From a committed version to engines that hold it: one publication at a time, beside the training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from slipstream.cluster.flow import Flow
from slipstream.cluster.telemetry import Telemetry
from slipstream.cluster.transport import Publication, Transport
from slipstream.core.metrics import Last, Mean, Metrics, merge
from slipstream.core.records import WeightVersion


class Publisher:
    """Streams versions to the fleet and confirms them to the flow.  ``confirmed`` is called after every confirmation."""

    def __init__(
        self,
        transport: Transport,
        flow: Flow,
        telemetry: Telemetry,
        confirmed: Callable[[WeightVersion], Awaitable[None]],
        count: int = 0,
    ) -> None:
        """``count`` publications came before this attempt."""
        self._transport = transport
        self._flow = flow
        self._telemetry = telemetry
        self._confirmed = confirmed
        self._running: asyncio.Task[None] | None = None
        self._ended: list[Publication] = []
        self.count = count

    async def publish(self, version: WeightVersion) -> None:
        """Put the learner's weights of now into every engine, as ``version``."""
        await self._send(version, self._transport.export())

    async def start(self, version: WeightVersion, loops: asyncio.TaskGroup) -> None:
        """``publish`` in the background, once the publication before it has ended; its failure is at once that of ``loops``.

        When this returns, the learner has been asked: a step that is submitted later cannot get in before the export.
        """
        await self.finish()
        self._running = loops.create_task(self._send(version, self._transport.export()))

    async def _send(self, version: WeightVersion, exported: Any) -> None:
        publication = await self._transport.send(version, exported)
        self._ended.append(publication)
        self.count += 1
        self._flow.confirm(version)
        self._telemetry.event(
            "confirmed",
            version=str(version),
            publish_s=publication.publish_s,
            pause_s=publication.pause_s,
            bytes=publication.nbytes,
            staged_tokens=publication.staged_tokens,
        )
        await self._confirmed(version)

    async def finish(self) -> None:
        """Wait for the publication under way.  Raises what made it fail."""
        if self._running is not None:
            await self._running

    def metrics(self) -> Metrics:
        """``weights/*`` of the publications that have ended since the last call; empty where none has."""
        ended, self._ended = self._ended, []
        return merge(
            {
                "weights/publish_s": Mean(publication.publish_s),
                "weights/pause_s": Mean(publication.pause_s),
                "weights/bytes": Last(publication.nbytes),
                "weights/staged_tokens": Mean(publication.staged_tokens),
            }
            for publication in ended
        )
