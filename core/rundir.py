"""``runs/<name>/``: everything one run leaves behind, written so that a crash at any moment leaves it readable.

recipe.yaml      resolved, secrets redacted        checkpoints/  one folder per checkpoint
metrics.jsonl    one line per step                 logs/         of the processes
events.jsonl     starts, updates, faults           summary.json  at the end and on failure
samples.jsonl    one per sample of a batch         report.html   `slipstream report`
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

from slipstream.core.mistakes import UserError, did_you_mean
from slipstream.core.recipe import dump_recipe, load_recipe
from slipstream.core.schema import Recipe

Stream = Literal["metrics", "events", "samples"]
_A_RUN = "the directory of a run such as runs/quickstart"
_BATCH_KEY: dict[Stream, str] = {"metrics": "step", "samples": "batch"}


class JsonLines(NamedTuple):
    """The records of a JSONL file.  ``torn``: its last line was cut off by a crash and is left out."""

    records: list[dict[str, Any]]
    torn: bool


class RunDirectory:
    """One run's directory.  A writer (``create``, ``open(write=True)``) holds its lock until ``close``; readers need none."""

    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self.recipe_file = path / "recipe.yaml"
        self.summary_file = path / "summary.json"
        self.report_file = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self._lock = lock
        self._streams: dict[str, int] = {}

    @classmethod
    def create(cls, root: Path, recipe: Recipe) -> RunDirectory:
        """Start ``root/<recipe.name>``.  Raises UserError if it exists: no run ever writes into another's directory."""
        path = root / recipe.name
        root.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()
        except FileExistsError:
            free = next(f"{recipe.name}-{n}" for n in range(2, 1_000_000) if not (root / f"{recipe.name}-{n}").exists())
            raise UserError(
                f"run directory: {path} exists already; continue that run with `slipstream resume {path}`, "
                f"or start a new one under another name: name={free}"
            ) from None
        run = cls(path, _lock(path))
        for folder in (run.checkpoints, run.logs):
            folder.mkdir()
        run.write_recipe(recipe)
        return run

    @classmethod
    def open(cls, path: Path, *, write: bool = False) -> RunDirectory:
        """An existing run: to read, or with ``write`` to continue it.

        Raises UserError if ``path`` is no run directory, or another process writes to it.  A line that a crash cut off
        is removed when a writer opens the run, so that the next record starts on a line of its own.
        """
        if not (path / "recipe.yaml").is_file():
            raise UserError(f"run directory: {path} has no recipe.yaml, expected {_A_RUN}{_known_runs(path.parent)}")
        if not write:
            return cls(path)
        run = cls(path, _lock(path))
        for stream in get_args(Stream):
            _heal(run.stream_file(stream))
        return run

    def stream_file(self, stream: Stream) -> Path:
        return self.path / f"{stream}.jsonl"

    def write_recipe(self, recipe: Recipe) -> None:
        """``recipe.yaml``, resolved and redacted: at the start, and with what a resume has changed."""
        write_atomically(self.recipe_file, dump_recipe(recipe).encode())

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """The run's recipe.  Raises RecipeError where a redacted secret is not given again as an override."""
        return load_recipe([self.recipe_file], overrides)

    def search_path(self) -> Path:
        """Where the run's own reward functions stand, as its last ``start`` event says."""
        starts = [event for event in self.read("events").records if event.get("kind") == "start"]
        return Path(starts[-1]["search_path"]) if starts else Path.cwd()

    def append(self, stream: Stream, record: Mapping[str, Any]) -> None:
        """Add one line by one write.  ``metrics`` need an integer ``step``, ``samples`` an integer ``batch``.

        Raises ValueError, naming the key, for NaN and infinity, which are no JSON.
        """
        assert self._lock is not None, f"{self.path} was opened to read"
        key = _BATCH_KEY.get(stream)
        assert key is None or isinstance(record.get(key), int), f"a record of {stream} needs an integer {key!r}"
        line = _encode(record) + b"\n"
        if stream not in self._streams:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._streams[stream] = os.open(self.stream_file(stream), flags, 0o644)
        written = os.write(self._streams[stream], line)
        if written != len(line):
            size = os.fstat(self._streams[stream]).st_size
            os.ftruncate(self._streams[stream], size - written)  # half a line before the next record would damage the file
            raise OSError(f"{self.stream_file(stream)}: only {written} of {len(line)} bytes were written; is the disk full?")

    def read(self, stream: Stream) -> JsonLines:
        """All records of a stream; none if it was never written."""
        file = self.stream_file(stream)
        return read_jsonl(file) if file.exists() else JsonLines([], False)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json at once: a reader sees the old one or the new one.  Raises ValueError for NaN and infinity."""
        write_atomically(self.summary_file, _encode(summary, indent=1) + b"\n")

    def rewind(self, batch: int) -> dict[str, int]:
        """Forget the batches after ``batch``: a resumed run repeats them.  Returns how many records went, by stream.

        Drops records with ``step > batch`` from metrics and with ``batch > batch`` from samples; events stay.
        """
        assert self._lock is not None, f"{self.path} was opened to read"
        dropped: dict[str, int] = {}
        for stream, key in _BATCH_KEY.items():
            if descriptor := self._streams.pop(stream, None):
                os.close(descriptor)
            file = self.stream_file(stream)
            dropped[stream] = sum(record[key] > batch for _, record in _whole_lines(file)) if file.exists() else 0
            if dropped[stream]:
                write_atomically(file, (line for line, record in _whole_lines(file) if record[key] <= batch))
        return dropped

    def close(self) -> None:
        """Close the streams and release the lock; nothing more can be written."""
        for descriptor in self._streams.values():
            os.close(descriptor)
        self._streams.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def require_run(path: Path, root: Path) -> None:
    """Raise UserError if ``path`` is no run, naming those beside it, or else in ``root``."""
    if _is_run(path):
        return
    beside = _known_runs(path.parent, path.name) or _known_runs(root, path.name)
    what = "is no run directory" if path.exists() else "does not exist"
    there = beside or "; there is none yet: `slipstream run RECIPE`"
    raise UserError(f"run directory: {path} {what}, expected {_A_RUN}{there}")


def _known_runs(root: Path, meant: str = "") -> str:
    runs = [path for path in root.glob("*") if _is_run(path)]
    newest = sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)[:10]
    near = did_you_mean(meant, [path.name for path in runs])
    return f"; there are {', '.join(map(str, newest))}{near}" if newest else ""


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("recipe.yaml", "events.jsonl"))


def read_jsonl(path: Path) -> JsonLines:
    """Records of a JSONL file, one object per line.

    A last line without its newline that is no whole object was torn by a crash: it is left out and ``torn`` is True.
    Raises UserError, with file and line, for any other line that is not a JSON object.
    """
    records, torn = [], False
    for _, record in _lines(path):
        if record is None:
            torn = True
        else:
            records.append(record)
    return JsonLines(records, torn)


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Every line with its record, None where the last one is torn; one line at a time in memory.  Raises as ``read_jsonl``."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            record = _decode(line)
            if record is None and line.endswith(b"\n"):
                raise UserError(f"{path}:{number}: got {line[:60]!r}, expected a JSON object; the file was edited or damaged")
            yield line, record


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for line, record in _lines(path):
        if record is not None:
            yield line.rstrip(b"\n") + b"\n", record


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file that is either old or new, never half, even if the machine stops: write aside, sync, rename."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(path: Path) -> int:
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise UserError(
            f"run directory: {path} is being written by process {owner}; wait for it, stop it, or choose another name="
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _heal(path: Path) -> None:
    """End the file at a line's end: complete a whole last record, cut off a torn one."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end, tail = 0, b""
        for line in file:
            if line.endswith(b"\n"):
                end += len(line)
            else:
                tail = line
        if tail and _decode(tail) is not None:
            file.write(b"\n")
        else:
            file.truncate(end)


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _encode(record: Mapping[str, Any], indent: int | None = None) -> bytes:
    try:
        text = json.dumps(record, allow_nan=False, ensure_ascii=False, indent=indent)
    except ValueError:
        bad = next(_non_finite(record, ""), None)
        if bad is None:
            raise
        raise ValueError(f"{bad[0]}: got {bad[1]}, expected a finite number; NaN and infinity are no JSON") from None
    return text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes its JSON escape


def _non_finite(value: Any, key: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _non_finite(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _non_finite(item, f"{key}[{index}]")
