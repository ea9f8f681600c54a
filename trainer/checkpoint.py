"""Checkpoints that are whole or not there.

A checkpoint is a folder ``step-00000012`` with whatever its writers put in it and a ``MANIFEST.json`` of sizes and SHA-256.
It is written beside its place, flushed to the disk, and published by one rename; then ``LATEST`` is made to name it.  At every
instant, ``LATEST`` names a complete checkpoint or there is none yet: one that replaces the named one is ``step-00000012-2``.
Plain files and no tensors here: see ``state``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from slipstream.core.mistakes import UserError

MANIFEST, LATEST = "MANIFEST.json", "LATEST"
LEARNER = "learner"
"""The part of a checkpoint that ``Learner.save`` writes; its ``model`` is what ``export_model`` exports."""
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})(?:-2)?")
_DRAFT = ".draft-"


class CheckpointError(UserError):
    """A checkpoint is not what its manifest says, or not what the learner needs."""


@contextmanager
def write_checkpoint(root: Path, *, step: int, keep: int) -> Iterator[Path]:
    """Give an empty folder to write into; publish it as the checkpoint of ``step`` when the block ends cleanly.

    If the block or the publication fails (a full disk raises OSError), the folder is removed and what was published before
    stays as it was.  Afterwards only the ``keep`` newest stay; checkpoints of later steps belong to a future that was
    rolled back, and go too.  One writer per ``root``: drafts that a crash left behind are removed.

        with write_checkpoint(run / "checkpoints", step=12, keep=2) as draft:
            learner.save(draft / LEARNER)
    """
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    draft = root / f"{_DRAFT}{uuid4().hex}"
    draft.mkdir()
    try:
        yield draft
        _write_manifest(draft)
        place = _publish(draft, root, step)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _prune(root, place, keep)
    _sweep(root)


def verify(checkpoint: Path) -> None:
    """Raise CheckpointError, naming every file that is missing, unexpected, cut short or altered.  Reads everything."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}: no readable {MANIFEST} ({error}); the checkpoint was never completed") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{checkpoint}: format {manifest.get('format')!r}, expected {FORMAT}; written by another version")
    listed = manifest["files"]
    present = {_relative(file, checkpoint) for file in _files(checkpoint)} - {MANIFEST}
    problems = [f"{name}: unexpected" for name in sorted(present - listed.keys())]
    for name, expected in sorted(listed.items()):
        file = checkpoint / name
        if name not in present:
            problems.append(f"{name}: missing")
        elif file.stat().st_size != expected["bytes"]:
            problems.append(f"{name}: {file.stat().st_size} bytes, expected {expected['bytes']}")
        elif (found := _sha256(file)) != expected["sha256"]:
            problems.append(f"{name}: SHA-256 {found[:12]}…, expected {expected['sha256'][:12]}…")
    if problems:
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(problems)}")


def latest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint, verified, and a warning for each one that had to be passed over.

    Normally the one that ``LATEST`` names, and no warning.  None, without a warning, where nothing was published.
    Raises CheckpointError if there are checkpoints and none of them is valid.
    """
    named, published = _named(root), _published(root)
    if named is None and not published:
        return None, []
    warnings: list[str] = []
    if named is not None:
        newest = _step_of(named)
        candidates = [named, *(path for path in published if _step_of(path) < newest)]
    else:
        candidates = published
        warnings.append(f"{root / LATEST} is missing; taking the newest valid checkpoint")
    for candidate in candidates:
        try:
            verify(candidate)
        except CheckpointError as error:
            warnings.append(f"passed over: {error}")
        else:
            return candidate, warnings
    raise CheckpointError(f"{root}: no valid checkpoint. {' '.join(warnings)}")


def export_model(checkpoint: Path, out: Path) -> None:
    """Write the policy of a checkpoint as a plain Hugging Face folder: weights, config, tokenizer, generation config.

    Whole or not at all.  Raises CheckpointError if the checkpoint is damaged or holds no model, ValueError if ``out`` is there
    and not an empty folder.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"export: {out} exists and is not an empty folder; name another place or remove it first")
    verify(checkpoint)
    model = checkpoint / LEARNER / "model"
    if not model.is_dir():
        raise CheckpointError(f"{checkpoint}: no {LEARNER}/model in it")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f"{_DRAFT}{out.name}-{uuid4().hex}")
    try:
        shutil.copytree(model, draft)
        _flush(draft)
        draft.rename(out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _flush_folder(out.parent)


def _write_manifest(draft: Path) -> None:
    files = {_relative(file, draft): {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(_files(draft))}
    (draft / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
    _flush(draft)


def _publish(draft: Path, root: Path, step: int) -> Path:
    place = root / f"step-{step:08d}"
    if _named(root) == place:
        place = root / f"{place.name}-2"
    if place.exists():  # of an attempt that was rolled back, or that died before LATEST named it
        place.rename(root / f"{_DRAFT}{uuid4().hex}")
    draft.rename(place)
    _flush_folder(root)
    pointer = root / f"{_DRAFT}{LATEST}"
    with pointer.open("w") as file:
        file.write(place.name)
        file.flush()
        os.fsync(file.fileno())
    pointer.replace(root / LATEST)
    _flush_folder(root)
    return place


def _named(root: Path) -> Path | None:
    """What ``LATEST`` names, be it there or not."""
    pointer = root / LATEST
    return root / pointer.read_text().strip() if pointer.is_file() else None


def _prune(root: Path, newest: Path, keep: int) -> None:
    others = [path for path in _published(root) if path != newest]
    past = [path for path in others if _step_of(path) < _step_of(newest)]
    for path in [*(p for p in others if p not in past), *past[keep - 1 :]]:
        path.rename(root / f"{_DRAFT}{uuid4().hex}")  # a crash during the removal must not leave half of it under a good name


def _sweep(root: Path) -> None:
    """Remove drafts: those of crashes, and what was renamed to be removed; and a checkpoint whose step ``LATEST`` has twice."""
    if (named := _named(root)) is not None:
        for path in _published(root):
            if _step_of(path) == _step_of(named) and path != named:
                path.rename(root / f"{_DRAFT}{uuid4().hex}")
    for draft in root.glob(f"{_DRAFT}*"):
        if draft.is_dir():
            shutil.rmtree(draft)
        else:
            draft.unlink()


def _published(root: Path) -> list[Path]:
    """Newest first."""
    return sorted((path for path in root.glob("step-*") if _NAME.fullmatch(path.name)), key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path}: got the name {path.name!r}, expected 'step-' and a number")
    return int(match[1])


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _relative(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    """Force files and directories to the disk, the inner ones first."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            _flush_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
