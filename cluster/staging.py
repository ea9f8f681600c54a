"""The run's place in shared memory on the driver's node: made before the run, gone after it, however it ended.

The engines clean up behind themselves, but not when they are killed.  The driver holds a lock in the folder, so what a killed
driver has left can be told from what another run is using, and the next run removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from slipstream.rollout.weights import shared_memory_root

PREFIX = "slipstream-"
LOCK = ".lock"


@contextlib.contextmanager
def staging(run_id: str, root: Path | None = None) -> Iterator[Path]:
    """The folder in which ``rollout.weights.Stager(run_id)`` of this node works; removes those of dead runs first."""
    root = root or shared_memory_root()
    for left in leftovers(root):
        shutil.rmtree(left, ignore_errors=True)
    folder = root / f"{PREFIX}{run_id}"
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def leftovers(root: Path | None = None) -> list[Path]:
    """What killed drivers have left: folders whose lock nobody holds.  The next run removes them."""
    root = root or shared_memory_root()
    return sorted(lock.parent for lock in root.glob(f"{PREFIX}*/{LOCK}") if _is_free(lock))


def _is_free(lock_file: Path) -> bool:
    try:
        lock = os.open(lock_file, os.O_RDWR)
    except (FileNotFoundError, PermissionError):  # gone by now, or another user's
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
