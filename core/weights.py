"""What a set of weights consists of, and how it is cut into buckets for the way to the engines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as the engine loads it: its checkpoint name, dtype (``"float32"``) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together, one after the other in one flat byte buffer.

    ``offsets()`` of specs of 8 and 4 bytes is ``[(0, 8), (8, 12)]``.
    """

    index: int
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def offsets(self) -> list[tuple[int, int]]:
        """``(start, end)`` in bytes of each tensor within the flat buffer."""
        ends, position = [], 0
        for tensor in self.tensors:
            ends.append((position, position + tensor.nbytes))
            position += tensor.nbytes
        return ends


def plan_buckets(tensors: Iterable[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Cut tensors, in order, into buckets of at most ``bucket_bytes`` (a larger tensor gets a bucket of its own).

    Raises ValueError for a size below 1 or a tensor that occurs twice.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: got {bucket_bytes}, expected at least 1")
    buckets: list[Bucket] = []
    seen: set[str] = set()
    pending: list[TensorSpec] = []
    for tensor in tensors:
        if tensor.name in seen:
            raise ValueError(f"tensor {tensor.name!r} occurs twice in the weight plan")
        seen.add(tensor.name)
        if pending and sum(t.nbytes for t in pending) + tensor.nbytes > bucket_bytes:
            buckets.append(Bucket(len(buckets), tuple(pending)))
            pending = []
        pending.append(tensor)
    if pending:
        buckets.append(Bucket(len(buckets), tuple(pending)))
    return buckets


def checksum(data: Any) -> int:
    """CRC-32 of a contiguous buffer (1 GB/s and more): guards against torn and swapped buckets, not against an adversary."""
    return crc32(memoryview(data).cast("B"))


def check_bucket(bucket: Bucket, data: Any, expected: int) -> None:
    """Raise ValueError if ``data`` is not the bucket that was sent (wrong size or checksum)."""
    view: Sequence[int] = memoryview(data).cast("B")
    if len(view) != bucket.nbytes:
        raise ValueError(f"weight bucket {bucket.index}: got {len(view)} bytes, expected {bucket.nbytes}")
    if (found := crc32(view)) != expected:  # type: ignore[arg-type]
        raise ValueError(f"weight bucket {bucket.index}: checksum {found:08x}, expected {expected:08x}; the transfer is torn")
