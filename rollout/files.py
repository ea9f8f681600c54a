"""Tasks from files: ``.jsonl``, ``.parquet``, or a folder saved by ``datasets``; TRL's columns, and verl's.

Every row that cannot be used is named with its place, up to twenty at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from slipstream.core.mistakes import UserError, did_you_mean, siblings
from slipstream.core.recipe_problems import options_of
from slipstream.core.section import Section
from slipstream.rollout.rows import Row

MAX_PROBLEMS = 20
_TEXT_COLUMNS = ("prompt", "messages", "completion")


class FileOptions(Section):
    """Options of a file source."""

    split: str = "train"
    """Which part of a folder that holds several."""


def read_rows(path: Path, options: Mapping[str, Any], answer_column: str) -> list[Row]:
    """The rows of a file.

    ``prompt`` is text, messages, or token ids; ``messages`` is a conversation, whose last turn is the demonstration if it is
    the assistant's; ``completion`` is a demonstration (text or messages).  The answer is ``answer_column``, or verl's
    ``reward_model.ground_truth``.  All other columns are handed to the reward functions.

    Raises UserError for a missing, empty, or unreadable file, and for bad rows, with file and line.
    """
    chosen = options_of(FileOptions, options, "data.options")
    _require_rows_at(path, "data.source")
    digest(path)
    rows: list[Row] = []
    problems: list[str] = []
    for place, record in _records(path, chosen.split):
        try:
            if isinstance(record, ValueError):
                raise record
            rows.append(_row(record, answer_column))
        except ValueError as error:
            problems.append(f"{place}: {error}")
            if len(problems) == MAX_PROBLEMS:
                problems.append("… and perhaps more; the first twenty are shown")
                break
    if problems:
        raise UserError("data.source has rows that cannot be used:\n  " + "\n  ".join(problems))
    if not rows:
        raise UserError(f"data.source: {path} has no rows")
    return rows


def digest(path: Path) -> str | None:
    """BLAKE2 of the file (of a folder: of its Arrow files); None where there is none.

    It is taken once in a process, at the latest when the rows are read: of what a run trains on, whatever becomes of the file.
    """
    try:
        return _digest(path.resolve())
    except FileNotFoundError:
        return None


@lru_cache
def _digest(path: Path) -> str:
    files = [path]
    if path.is_dir():  # what `datasets` caches there are no rows
        files = sorted(file for file in path.rglob("*.arrow") if not file.name.startswith(("cache-", "tmp")))
    whole = hashlib.blake2b(digest_size=16)
    for file in files:
        with file.open("rb") as opened:
            whole.update(hashlib.file_digest(opened, "blake2b").digest())
    return whole.hexdigest()


def first_row(path: Path, options: Mapping[str, Any], answer_column: str, source_key: str, options_key: str) -> Row | None:
    """The first row of a ``.jsonl`` file; None for other files, which are only asked whether they are there.

    Raises as ``read_rows``, about the file and this row.
    """
    options_of(FileOptions, options, options_key)
    _require_rows_at(path, source_key)
    if path.suffix != ".jsonl":
        return None
    place, record = next(_json_lines(path), (str(path), None))
    if record is None:
        raise UserError(f"{source_key}: {path} has no rows")
    try:
        if isinstance(record, ValueError):
            raise record
        return _row(record, answer_column)
    except ValueError as error:
        raise UserError(f"{source_key}: {place}: {error}") from error


def _require_rows_at(path: Path, key: str) -> None:
    if not path.exists():
        expected = "expected a .jsonl or .parquet file, or a folder saved by datasets"
        raise UserError(f"{key}: {path} does not exist; {expected}{did_you_mean(path.name, siblings(path))}")
    if path.is_dir() and not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise UserError(f"{key}: {path} is no folder written by datasets' save_to_disk")
    if not path.is_dir() and path.suffix not in (".jsonl", ".parquet"):
        raise UserError(
            f"{key}: got {path}, expected .jsonl, .parquet, a folder saved by datasets, builtin:… or reasoning_gym:…"
        )


def _records(path: Path, split: str) -> Iterator[tuple[str, dict[str, Any] | ValueError]]:
    if path.is_dir():
        return _numbered(path, _folder(path, split))
    if path.suffix == ".jsonl":
        return _json_lines(path)
    import pyarrow.lib
    import pyarrow.parquet

    try:
        return _numbered(path, pyarrow.parquet.read_table(path).to_pylist())
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise UserError(f"data.source: {path} is no readable parquet file ({error})") from error


def _numbered(path: Path, records: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any] | ValueError]]:
    return ((f"{path} row {number}", record) for number, record in enumerate(records))


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | ValueError]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            record: Any
            try:
                record = json.loads(line)
            except ValueError as error:
                record = ValueError(f"not JSON ({error})")
            if not isinstance(record, dict | ValueError):
                record = ValueError(f'got {line.strip()[:40]!r}, expected an object such as {{"prompt": …, "answer": …}}')
            yield f"{path}:{number}", record


def _folder(path: Path, split: str) -> Iterable[dict[str, Any]]:
    from datasets import DatasetDict, load_from_disk

    try:
        data = load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"data.source: {path} is no folder written by datasets' save_to_disk ({error})") from error
    if isinstance(data, DatasetDict):
        if split not in data:
            raise UserError(f"data.options.split: got {split!r}, expected one of {', '.join(data)}")
        data = data[split]
    return data


def _row(record: dict[str, Any], answer_column: str) -> Row:
    prompt, completion = _prompt_and_completion(record)
    columns = {name: value for name, value in record.items() if name not in _TEXT_COLUMNS}
    return Row(prompt, _answer(record, answer_column), completion, columns)


def _prompt_and_completion(record: dict[str, Any]) -> tuple[Any, str | None]:
    if "prompt" in record:
        completion = record.get("completion")
        if isinstance(completion, list):
            completion = _last_assistant(_messages(completion, "completion"), "completion")
        if completion is not None and not isinstance(completion, str):
            raise UserError(f"`completion`: got {type(completion).__name__}, expected text or messages")
        return _prompt(record["prompt"]), completion
    if "messages" not in record:
        raise UserError(f"no column `prompt` or `messages`; there are {', '.join(sorted(record)) or 'none'}")
    messages = _messages(record["messages"], "messages")
    if messages[-1]["role"] != "assistant":
        return messages, None
    if len(messages) == 1:
        raise UserError("`messages` holds the assistant's turn only, expected a prompt before it")
    return messages[:-1], messages[-1]["content"]


def _prompt(value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        if all(type(token) is int for token in value):
            return tuple(value)
        return _messages(value, "prompt")
    got = "nothing" if value in ("", [], None) else type(value).__name__
    raise UserError(f"`prompt`: got {got}, expected text, messages, or token ids")


def _messages(value: Any, column: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise UserError(
            f"`{column}`: got {'an empty list' if value == [] else type(value).__name__}, expected a list of messages"
        )
    messages = []
    for position, message in enumerate(value):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError(f"`{column}`[{position}]: expected {{role: text, content: text}}, got {message!r:.60}")
        if extra := sorted(key for key, item in message.items() if key not in ("role", "content") and item is not None):
            raise UserError(f"`{column}`[{position}]: {', '.join(extra)} is not supported, only role and content are")
        messages.append({"role": message["role"], "content": message["content"]})
    return tuple(messages)


def _last_assistant(messages: Sequence[Mapping[str, str]], column: str) -> str:
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise UserError(f"`{column}`: expected one message of the assistant, got {[message['role'] for message in messages]}")
    return messages[0]["content"]


def _answer(record: dict[str, Any], answer_column: str) -> str | None:
    value = record.get(answer_column)
    if answer_column in record:
        source = f"`{answer_column}`"
    elif isinstance(record.get("reward_model"), dict):
        value, source = record["reward_model"].get("ground_truth"), "`reward_model.ground_truth`"
    elif answer_column != "answer":
        raise UserError(f"no column `{answer_column}` (data.answer_column); there are {', '.join(sorted(record))}")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UserError(f"{source}: got {type(value).__name__}, expected text or a number")
