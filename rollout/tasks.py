"""Where tasks come from, and their order: a pure function of (seed, epoch, position).

Evaluation never shares a prompt with training (``builtin:guess_number`` apart, which has only one).  Generated sources divide
prompts by a hash of their text.  A file gives its
last ``monitor.eval.size`` rows, which training then leaves out together with every row of the same prompt, unless
``monitor.eval.source`` names another source.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Protocol

from slipstream.core.mistakes import UserError, did_you_mean
from slipstream.core.recipe_problems import options_of
from slipstream.core.records import Task
from slipstream.core.schema import Data, Evaluation
from slipstream.core.section import Section
from slipstream.rollout.files import first_row, read_rows
from slipstream.rollout.generated import NumberSorting, ReasoningGym, gym_names, number_sorting, require_gym
from slipstream.rollout.guess_number import GuessNumberTasks, guess_number
from slipstream.rollout.rows import Row, Split

BUILT_IN = {"builtin:number_sorting": number_sorting, "builtin:guess_number": guess_number}
_OPTIONS: dict[str, type[Section]] = {"builtin:number_sorting": NumberSorting, "builtin:guess_number": GuessNumberTasks}
_GYM = "reasoning_gym:"


def is_file(source: str) -> bool:
    """Whether ``data.source`` names a file or folder of rows, rather than a generator of tasks."""
    return not source.startswith(("builtin:", _GYM))


class TaskSource(Protocol):
    """Tasks by epoch and position, ``0 <= position < len(source)``; the same arguments give the same task in every run."""

    def __len__(self) -> int: ...

    def task(self, epoch: int, position: int) -> Task: ...


class Tasks:
    """Rows in an order: shuffled anew in every epoch by (seed, epoch), or as they stand."""

    def __init__(self, rows: Sequence[Row], *, source: str, split: Split, seed: int, shuffle: bool) -> None:
        self._rows = rows
        self._source = source
        self._split = split
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        return len(self._rows)

    def task(self, epoch: int, position: int) -> Task:
        """The task at ``position`` of ``epoch``, ``train/<epoch>/<position>``.  Raises IndexError beyond the last position."""
        if epoch < 0 or not 0 <= position < len(self._rows):
            raise IndexError(f"task ({epoch}, {position}) of {len(self._rows)} per epoch")
        row = self._rows[self._order(epoch)[position]]
        return Task(
            id=f"{self._split}/{epoch}/{position}",
            epoch=epoch,
            position=position,
            prompt=row.prompt,
            answer=row.answer,
            completion=row.completion,
            columns=row.columns,
            source=self._source,
        )

    def _permutation(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._rows))
        order = list(range(len(self._rows)))
        Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def open_source(data: Data, seed: int, split: Split, evaluation: Evaluation | None = None) -> Tasks:
    """The tasks of the recipe's training source, or of its evaluation (``monitor.eval``), which is never shuffled.

    Give ``evaluation`` for both splits: it says which rows of a file are held out of training.

    Raises UserError for a source that does not exist or cannot be read, bad rows, bad options, or too few rows.
    """
    if split == "train":
        rows = _rows(data, seed, "train", evaluation)
        return Tasks(rows, source=data.source, split="train", seed=seed, shuffle=data.shuffle)
    if evaluation is None or evaluation.size == 0:
        raise UserError("monitor.eval.size: got 0, expected the number of tasks to evaluate on")
    other = evaluation.source is not None
    options = evaluation.options if other else {**data.options, **evaluation.options}
    source = evaluation.source if evaluation.source is not None else data.source
    if source in BUILT_IN or source.startswith(_GYM):
        options = {**options, "size": evaluation.size}
    held_out = data.model_copy(update={"source": source, "options": options})
    rows = _rows(held_out, seed, "eval", None if other else evaluation)[: evaluation.size]
    return Tasks(rows, source=source, split="eval", seed=seed, shuffle=False)


def look_at_source(data: Data, source_key: str = "data.source", options_key: str = "data.options") -> Row | None:
    """The first row, where it can be read in no time (``.jsonl``).

    Raises UserError, naming the keys, for a source that is not there, or options that it does not have.  Options of
    reasoning-gym's data sets are known to that package only, and rows after the first, or of other files, are not read.
    """
    source = data.source
    if source in BUILT_IN:
        options_of(_OPTIONS[source], data.options, options_key)
    elif source.startswith("builtin:"):
        raise UserError(f"{source_key}: got {source}, expected one of {', '.join(BUILT_IN)}{did_you_mean(source, BUILT_IN)}")
    elif source.startswith(_GYM):
        require_gym(source.removeprefix(_GYM), gym_names(), source_key)
    else:
        return first_row(Path(source), data.options, data.answer_column, source_key, options_key)
    return None


def _rows(data: Data, seed: int, split: Split, evaluation: Evaluation | None) -> Sequence[Row]:
    """All rows of one side of the split; ``evaluation`` where a file has to be divided."""
    if data.source.startswith("builtin:"):
        look_at_source(data)
        generate = BUILT_IN[data.source]
        return generate(data.options, seed, split)
    if data.source.startswith(_GYM):
        return ReasoningGym(data.source.removeprefix(_GYM), data.options, seed, split)
    rows = read_rows(Path(data.source), data.options, data.answer_column)
    if evaluation is None or evaluation.size == 0 or evaluation.source is not None:
        return rows
    held_out = rows[-evaluation.size :]
    prompts = {repr(row.prompt) for row in held_out}
    kept = [row for row in rows[: -evaluation.size] if repr(row.prompt) not in prompts]
    if not kept:
        raise UserError(
            f"monitor.eval.size: got {evaluation.size}, but {data.source} has {len(rows)} rows, and nothing would be left to "
            "train on; lower size, set it to 0, or give monitor.eval.source"
        )
    return held_out if split == "eval" else kept
