"""A model's folder as its config.json and the tensors of its safetensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

Place = tuple[Path, dict[str, Any]]
"""A model's folder and its config."""
Shapes = dict[str, tuple[int, ...]]


def shapes(folder: Path) -> Shapes:
    """Of all tensors of a folder's safetensors, read off their headers."""
    found: Shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def parameters(folder: Path) -> int:
    """Elements of all tensors of a folder's safetensors."""
    return sum(map(math.prod, shapes(folder).values()))


def not_finite(folder: Path) -> str | None:
    """The first tensor with NaN or infinity, or None.  Tensor by tensor, so that no more than one is in memory."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                if not (tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all():
                    return str(name)
    return None


def tensor_of(folder: Path, name: str) -> torch.Tensor:
    """One tensor of a folder's safetensors.  Raises KeyError where none has it."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_tensor(name)
    raise KeyError(name)
