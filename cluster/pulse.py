"""One event that all loops of the controller share, and the watch that bounds their waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from slipstream.cluster.fleet import Fleet
from slipstream.cluster.learners import LearnerGroup

T = TypeVar("T")

WATCH_S = 5.0


class Pulse:
    """``beat`` whenever something has moved; ``until`` waits for what a beat may bring."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._last = time.monotonic()

    def beat(self) -> None:
        self._last = time.monotonic()
        self._event.set()

    @property
    def still_s(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._last

    async def until(self, ready: Callable[[], T | None]) -> T:
        """The first value of ``ready`` that is not None, asked anew after every beat.  Bounded by ``watch``."""
        while (value := ready()) is None:
            self._event.clear()
            await self._event.wait()
        return value


async def watch(pulse: Pulse, fleet: Fleet, learners: LearnerGroup, limit_s: float, state: Callable[[], str]) -> None:
    """Raise when an engine or a rank is gone, or TimeoutError when nothing has moved for ``limit_s``, saying what ``state`` is.

    A rank answers between two steps only, so while the learner is busy the time limit of its own call counts.
    """
    ranks = asyncio.create_task(learners.check_health())
    while True:
        await asyncio.sleep(WATCH_S)
        await fleet.check_health()
        if ranks.done():
            ranks.result()
            ranks = asyncio.create_task(learners.check_health())
        if learners.busy:
            pulse.beat()
        elif pulse.still_s > limit_s:
            raise TimeoutError(
                f"nothing has moved for {pulse.still_s:.0f} s (cluster.stall_timeout_s = {limit_s:g}): {state()}"
            )
