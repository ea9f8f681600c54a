"""CUDA memory handed from process to process as plain values.

torch shares a CUDA tensor as a function and a tuple that holds classes; sent as it is, that needs pickle on the receiving side.
Here the tuple is spelt as numbers, bytes and a dtype's name, which vLLM's message format carries without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_DEVICE, _DTYPE = 6, 5
_CLASSES = {0: torch.Tensor, 4: torch.storage.UntypedStorage}


def export_handle(tensor: torch.Tensor) -> list[Any]:
    """A handle to ``tensor`` (contiguous, on CUDA), as plain values.  The tensor must outlive every use of the handle."""
    _, arguments = reduce_tensor(tensor.detach())
    return encode(arguments)


def encode(arguments: tuple[Any, ...]) -> list[Any]:
    """torch's arguments of ``rebuild_cuda_tensor`` without classes.  Raises ValueError if torch's layout is another one."""
    for position, expected in _CLASSES.items():
        if not (isinstance(arguments[position], type) and issubclass(arguments[position], expected)):
            raise ValueError(
                f"CUDA handle: argument {position} is {arguments[position]!r}, expected a {expected.__name__} class"
            )
    plain = list(arguments)
    for position in _CLASSES:
        plain[position] = None
    plain[_DTYPE] = str(arguments[_DTYPE]).removeprefix("torch.")
    return [list(value) if isinstance(value, torch.Size | tuple) else value for value in plain]


def decode(plain: list[Any], device_index: int) -> tuple[Any, ...]:
    """The inverse of ``encode``, for a process that sees the same GPU as ``device_index``."""
    arguments = [tuple(value) if isinstance(value, list) else value for value in plain]
    for position, kind in _CLASSES.items():
        arguments[position] = kind
    arguments[_DTYPE] = getattr(torch, plain[_DTYPE])
    arguments[_DEVICE] = device_index
    return tuple(arguments)


def open_handle(plain: list[Any], device_index: int) -> torch.Tensor:
    """The tensor behind a handle: the exporter's memory, not a copy."""
    return rebuild_cuda_tensor(*decode(plain, device_index))
