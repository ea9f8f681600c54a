"""Weights on their way into a running engine, in two verbs: ``stage`` while it generates, ``commit`` in a pause.

Which transport is used follows from what the machine can do (``choose_transport``), not from a setting:

- ``mapped``: buckets arrive as flat byte buffers, are verified and laid into shared memory as safetensors files, once per
  node; the engine's worker maps them at commit.  No RPC reaches the engine while it generates.
- ``nccl``: vLLM's own engine, between GPUs; ``plain_ipc``: memory of a learner on the same GPU.  Nothing is staged; the commit
  holds the transfer, and the pause says so.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import TensorSpec as SafetensorsSpec
from safetensors import serialize_file

from slipstream.core.weights import Bucket, TensorSpec, check_bucket

TransportName = Literal["mapped", "nccl", "plain_ipc"]


def choose_transport(*, gpus: int, wanted: int) -> TransportName:
    """By the GPUs of the cluster and those that engines and learner together want.

    None: ``mapped``.  Enough for one each: ``nccl``.  A single one for all: ``plain_ipc``, since NCCL joins no two processes
    on one GPU.  Several, but too few: ``mapped``, since who shares with whom is not known.
    """
    if gpus == 0:
        return "mapped"
    if gpus >= wanted:
        return "nccl"
    return "plain_ipc" if gpus == 1 else "mapped"


def shared_memory_root() -> Path:
    """Where files are memory: /dev/shm, or the temporary folder where there is none (macOS), which is slower but correct."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


@dataclass(frozen=True, slots=True)
class Staged:
    """One version, whole and verified, ready to be committed by every engine of this node."""

    version: str
    paths: tuple[str, ...]
    nbytes: int


class Stager:
    """Lays the buckets of one version at a time into shared memory.  One per node and run; not thread-safe."""

    def __init__(self, run_id: str, root: Path | None = None) -> None:
        self._root = (root or shared_memory_root()) / f"slipstream-{run_id}"
        self._arrived: dict[str, dict[int, tuple[Path, int]]] = {}

    def put(self, version: str, bucket: Bucket, data: np.ndarray, crc32: int) -> None:
        """Verify one bucket (uint8 [bucket.nbytes]) and write it down.  Raises ValueError on a torn or repeated bucket."""
        check_bucket(bucket, data, crc32)
        arrived = self._arrived.setdefault(version, {})
        if bucket.index in arrived:
            raise ValueError(f"weights {version}: bucket {bucket.index} arrived twice")
        folder = self._root / version
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{bucket.index:05d}.safetensors"
        address = data.ctypes.data  # `data` outlives the call, as serialize_file demands
        serialize_file(
            {
                spec.name: SafetensorsSpec(dtype=spec.dtype, shape=spec.shape, data_ptr=address + start, data_len=end - start)
                for spec, (start, end) in zip(bucket.tensors, bucket.offsets(), strict=True)
            },
            str(path),
        )
        arrived[bucket.index] = (path, bucket.nbytes)

    def complete(self, version: str, buckets: int) -> Staged:
        """All buckets have arrived, or ValueError says which are missing."""
        arrived = self._arrived.get(version, {})
        if missing := sorted(set(range(buckets)) - set(arrived)):
            raise ValueError(f"weights {version}: got {len(arrived)} of {buckets} buckets, missing {missing[:8]}")
        return Staged(version, tuple(str(arrived[i][0]) for i in range(buckets)), sum(n for _, n in arrived.values()))

    def discard(self, version: str) -> None:
        """Forget a version; its memory goes back to the system when no engine maps it any more."""
        self._arrived.pop(version, None)
        shutil.rmtree(self._root / version, ignore_errors=True)

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """A file in shared memory, gone at the end."""
        self._root.mkdir(parents=True, exist_ok=True)
        file = self._root / f"{name}-{uuid.uuid4().hex}.safetensors"
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything that this run staged on this node."""
        self._arrived.clear()
        shutil.rmtree(self._root, ignore_errors=True)


def mapped_update(staged: Staged) -> dict[str, Any]:
    """What ``worker.MappedWeights`` is told."""
    return {"paths": list(staged.paths)}


def ipc_update(names: Sequence[str], handles: Sequence[list[Any]]) -> dict[str, Any]:
    """What ``worker.IpcWeights`` is told."""
    return {"names": list(names), "handles": list(handles)}


def nccl_update(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """What vLLM's ``nccl`` engine is told: the tensors that will be broadcast, in order."""
    return {
        "names": [s.name for s in specs],
        "dtype_names": [s.dtype for s in specs],
        "shapes": [list(s.shape) for s in specs],
    }
