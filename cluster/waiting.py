"""Every wait is bounded, and says who was waited for when it gives up (invariant 8 of the design)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


async def within(timeout_s: float, what: str, call: Awaitable[T], key: str | None = "cluster.step_timeout_s") -> T:
    """The result of ``call``; after ``timeout_s`` it is cancelled, with a TimeoutError such as ``engine 1: commit of 0.3 took
    longer than cluster.step_timeout_s = 1800 s``.

    ``key`` is where the recipe sets the limit, None where it is fixed.  A TimeoutError of the call's own passes as it is.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await call
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(_too_late(timeout_s, what, key)) from None


@contextlib.contextmanager
def alarm(timeout_s: float, what: str, key: str) -> Iterator[None]:
    """``within`` for code that blocks the main thread (SIGALRM interrupts it)."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(_too_late(timeout_s, what, key))

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _too_late(timeout_s: float, what: str, key: str | None) -> str:
    return f"{what} took longer than {f'{key} = ' if key else ''}{timeout_s:g} s"
