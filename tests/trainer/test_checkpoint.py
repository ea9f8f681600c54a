"""Checkpoints are whole or not there: crashes at every step of a publication, damage, full disks, pruning."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.trainer.checkpoint import (
    LATEST,
    LEARNER,
    MANIFEST,
    CheckpointError,
    export_model,
    latest,
    verify,
    write_checkpoint,
)


def publish(root: Path, step: int, keep: int = 3, content: str = "") -> Path:
    with write_checkpoint(root, step=step, keep=keep) as draft:
        (draft / LEARNER / "model").mkdir(parents=True)
        (draft / LEARNER / "model" / "weights").write_text(content or f"weights of step {step}")
        (draft / "ledger.json").write_text(str(step))
    return root / f"step-{step:08d}"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_published_and_found_again(tmp_path: Path) -> None:
    path = publish(tmp_path, 12)
    assert names(tmp_path) == [LATEST, "step-00000012"]
    assert json.loads((path / MANIFEST).read_text())["files"]["ledger.json"] == {
        "bytes": 2,  # "12", whose SHA-256 is (coreutils):
        "sha256": "6b51d431df5d7f141cbececcf79edf3dd861c3b4069f0b11661a3eefacbba918",
    }
    assert latest(tmp_path) == (path, [])


def test_nothing_published_yet(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") == (None, [])
    (tmp_path / ".draft-abc").mkdir()
    assert latest(tmp_path) == (None, [])


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        publish(tmp_path, step, keep=2)
    assert names(tmp_path) == [LATEST, "step-00000003", "step-00000004"]


def test_pruning_follows_publication(tmp_path: Path) -> None:
    """With keep=1, a failed publication must leave the one that is there."""
    old = publish(tmp_path, 1, keep=1)
    with pytest.raises(RuntimeError, match="boom"), write_checkpoint(tmp_path, step=2, keep=1) as draft:
        (draft / "half").write_text("x")
        raise RuntimeError("boom")
    assert names(tmp_path) == [LATEST, "step-00000001"]
    assert latest(tmp_path) == (old, [])


def test_a_rolled_back_future_goes(tmp_path: Path) -> None:
    """Steps 1, 5 and 6 are there; the run was restored to 1, and publishes 5 again."""
    for step in (1, 5, 6):
        publish(tmp_path, step)
    path = publish(tmp_path, 5, content="second attempt")
    assert names(tmp_path) == [LATEST, "step-00000001", "step-00000005"]
    assert (path / LEARNER / "model" / "weights").read_text() == "second attempt"
    assert latest(tmp_path) == (path, [])


def damage_content(path: Path) -> str:
    (path / "ledger.json").write_text("9")  # the same length
    return r"ledger\.json: SHA-256 19581e27de7c…, expected d4735e3a265e…"  # of "9" and "2"


def damage_length(path: Path) -> str:
    (path / "ledger.json").write_text("2 and more")
    return r"ledger\.json: 10 bytes, expected 1"


def damage_missing(path: Path) -> str:
    (path / LEARNER / "model" / "weights").unlink()
    return r"learner/model/weights: missing"


def damage_extra(path: Path) -> str:
    (path / "stray").write_text("")
    return r"stray: unexpected"


def damage_manifest(path: Path) -> str:
    (path / MANIFEST).write_text("{")
    return r"no readable MANIFEST\.json"


@pytest.mark.parametrize("damage", [damage_content, damage_length, damage_missing, damage_extra, damage_manifest])
def test_damage_is_named_and_passed_over_with_a_warning(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    old, new = publish(tmp_path, 1), publish(tmp_path, 2)
    expected = damage(new)
    with pytest.raises(CheckpointError, match=expected):
        verify(new)
    found, (warning,) = latest(tmp_path)
    assert found == old
    assert "passed over" in warning
    damage_missing(old)
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        latest(tmp_path)


def publish_and_die(root: Path, step: int, at: int) -> int:
    """Publish in a child process that dies at its ``at``-th call that changes the file system.  Its exit status: 33, or 0."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = itertools.count()

    def crashing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if next(calls) == at:
                os._exit(33)
            return real(*arguments, **keywords)

        return call

    status = 1
    try:
        for name in ("rename", "replace", "fsync", "mkdir", "rmdir", "unlink"):
            setattr(os, name, crashing(getattr(os, name)))
        publish(root, step, keep=1, content="new")
        status = 0
    finally:
        os._exit(status)


@pytest.mark.parametrize("step", [2, 1], ids=["the next step", "the same step again"])
def test_a_crash_at_any_point_leaves_a_valid_checkpoint(tmp_path: Path, step: int) -> None:
    """The writer dies at its first, second, … call that changes the file system, until it comes through.

    Before the renaming of LATEST the old checkpoint counts, after it the new one.  Each is valid wherever it counts, no
    warning is needed, and the next publication cleans up.
    """
    seen = []
    for at in range(100):
        root = tmp_path / str(at)
        old = publish(root, 1, keep=1, content="old")
        status = publish_and_die(root, step, at)
        assert status in (0, 33)
        found, warnings = latest(root)
        assert found is not None
        assert warnings == []
        seen.append((found / LEARNER / "model" / "weights").read_text())
        assert seen[-1] == ("old" if found == old else "new")
        if at % 2:  # an attempt that begins where the last one ended
            publish(root, step, keep=2, content="third")
            found, warnings = latest(root)
            assert found is not None and warnings == []
            assert (found / LEARNER / "model" / "weights").read_text() == "third"
            assert len([name for name in names(root) if f"step-{step:08d}" in name]) == 1
        publish(root, 3, keep=1)
        assert names(root) == [LATEST, "step-00000003"]
        if status == 0:
            break
    # mkdir of draft and learner folders (3), fsync of files and folders (6), rename, fsync, LATEST: fsync, replace
    assert len(seen) > 13
    assert seen == sorted(seen, reverse=True), "old until LATEST is renamed, and new from then on"
    assert set(seen) == {"old", "new"}


@pytest.mark.parametrize("call", ["fsync", "rename", "replace"])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    old = publish(tmp_path, 1, keep=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        publish(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert latest(tmp_path) == (old, [])
    assert [n for n in names(tmp_path) if n.startswith(".")] in ([], [f".draft-{LATEST}"])


FULL = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    test_checkpoint.publish(Path(sys.argv[2]), 2, keep=1, content="x" * 5000)
except OSError as error:
    print(error.errno)
"""


def test_a_write_that_fails_halfway_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The kernel cuts a real write short (a limit on file sizes; a full disk behaves alike)."""
    old = publish(tmp_path, 1, keep=1)
    command = [sys.executable, "-c", FULL, str(Path(__file__).parent), str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert process.stdout.strip() == str(errno.EFBIG), process.stderr
    assert names(tmp_path) == [LATEST, "step-00000001"]
    assert latest(tmp_path) == (old, [])


def test_export(tmp_path: Path) -> None:
    checkpoint = publish(tmp_path / "checkpoints", 2)
    out = tmp_path / "exported" / "policy"
    export_model(checkpoint, out)
    assert names(out) == ["weights"]
    assert names(out.parent) == ["policy"]
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        export_model(checkpoint, out)
    damage_missing(checkpoint)
    with pytest.raises(CheckpointError, match="weights: missing"):
        export_model(checkpoint, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
