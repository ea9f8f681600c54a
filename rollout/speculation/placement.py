"""Where the draft learns: on a CUDA stream of its own beside the engine's, or, where there is none, between two rounds.

What belongs to the engine is copied on the engine's stream; what the student makes is touched ``aside`` only
while an update may run, and from either side after ``join``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor


class Placement(Protocol):
    @property
    def seconds(self) -> float:
        """What the last update took, once it is ``done``."""
        ...

    @property
    def done(self) -> bool:
        """Whether the last update has ended; only then may its weights be published."""
        ...

    def kept(self, copy: Tensor) -> Tensor:
        """``copy``, which the engine's stream has made, now safe to use aside."""
        ...

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """The student's side, behind everything that either side has been given so far."""
        ...

    def update(self) -> contextlib.AbstractContextManager[None]:
        """The same, around one update."""
        ...

    def join(self) -> None:
        """Let the engine's side see what the update has written."""
        ...

    def wait(self) -> None:
        """Return when the last update has ended."""
        ...


class Inline:
    """Everything in turn: a CPU has done a call's work when the call returns."""

    done = True
    seconds = 0.0

    def kept(self, copy: Tensor) -> Tensor:
        return copy

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds = time.perf_counter() - started

    def join(self) -> None:
        pass

    def wait(self) -> None:
        pass


class SideStream:
    """Updates run while the engine generates; the host only launches them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    @property
    def seconds(self) -> float:
        return self._start.elapsed_time(self._end) / 1000

    @property
    def done(self) -> bool:
        return self._end.query()

    def kept(self, copy: Tensor) -> Tensor:
        copy.record_stream(self._stream)  # or its memory is given away while this stream still reads it
        return copy

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        with self.aside():
            self._start.record(self._stream)
            yield
            self._end.record(self._stream)

    def join(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(self._end)

    def wait(self) -> None:
        self._end.synchronize()


def placement_on(device: torch.device) -> Placement:
    return SideStream(device) if device.type == "cuda" else Inline()


def sent(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    """``values`` as int64 on ``device``, without waiting for what its stream still has to do."""
    tensor = torch.tensor(values, dtype=torch.long)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
