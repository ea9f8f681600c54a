"""The ranks of a learner find each other.  One process is one rank; a group that lost a rank is never reused."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator


def join(rank: int, world_size: int, master_addr: str, master_port: int, timeout_s: float, local_rank: int = 0) -> None:
    """Enter the process group, gloo on CPU and NCCL on GPU, with rank 0 listening at ``master_addr:master_port``.

    ``timeout_s`` bounds the meeting and every collective after it.  ``local_rank`` is this rank's device among those the
    process sees; under Ray that is the first, since each actor is shown its own.
    Raises RuntimeError (torch's DistStoreError or DistBackendError among them) if the ranks do not meet in time.
    """
    on_gpu = torch.cuda.is_available()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(local_rank),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR=master_addr,
        MASTER_PORT=str(master_port),
    )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if on_gpu:
        torch.cuda.set_device(local_rank)
    else:
        _forbid_jit_on_cpu()
    assert get_accelerator().device_name() == ("cuda" if on_gpu else "cpu"), "DeepSpeed and torch see different devices"
    deepspeed.init_distributed(
        "nccl" if on_gpu else "gloo",
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=timeout_s),
        rank=rank,
        world_size=world_size,
        verbose=False,
    )


def leave() -> None:
    """Leave the process group, so that the process may join another."""
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()


def device() -> torch.device:
    """Where this rank's tensors live."""
    return torch.device(get_accelerator().current_device_name())


def free_port() -> int:
    """A TCP port that nobody listens on now.  To be asked on the node of rank 0, shortly before the ranks join."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def all_reduced(values: Sequence[torch.Tensor], op: Any = dist.ReduceOp.SUM) -> list[float]:
    """Scalars, reduced over the ranks in one collective, in float64."""
    stacked = torch.stack([value.detach().to(device(), torch.float64) for value in values])
    dist.all_reduce(stacked, op)
    return stacked.tolist()


def all_gathered(value: Any) -> list[Any]:
    """A picklable object of every rank, by rank.  Ranks of one group trust each other: they run the same code."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


def _forbid_jit_on_cpu() -> None:
    """Keep DeepSpeed from compiling C++ when it starts.

    On CPU every process builds ``deepspeed_shm_comm`` at init: minutes of g++, and a rank that is killed during the build
    leaves a lock file that hangs every later start.  gloo does the same work.  On GPU this kernel does not exist.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
