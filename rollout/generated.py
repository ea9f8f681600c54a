"""Generated tasks: the built-in number sorting, and every data set of reasoning-gym.

The stream of a source starts at a seed far from that of every other (reasoning-gym seeds item i with ``seed + i``).
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal, overload

from pydantic import Field, model_validator

from slipstream.core.mistakes import UserError
from slipstream.core.recipe_problems import options_of
from slipstream.core.section import Fraction, Positive, Section
from slipstream.rollout.rows import Row, Split, is_held_out

_SEED_SPACING = 10**9  # between seeds of runs; streams within one run are 5·10⁷ apart, with fewer items each
_STREAM_SPACING = 5 * 10**7
_WRONG_DIRECTION = 0.7  # of the wrong demonstrations; the others drop a number
_LONG_SHARES = ((0.62, 2, 4), (0.26, 5, 8), (0.12, 9, 16))  # share, fewest and most numbers
_TRIES = 64
_GYM_NAME = re.compile(r'^DATASET_NAME\s*=\s*"(\w+)"|register_dataset\("(\w+)"', re.MULTILINE)


class NumberSorting(Section):
    """Options of ``builtin:number_sorting``."""

    size: Positive = 20_000
    min_numbers: Positive = 3
    max_numbers: Positive = 6
    demonstrations: Literal["mixed", "clean", "none"] = "mixed"
    correct_fraction: Fraction = Field(
        0.5, description="of mixed demonstrations; the others sort the wrong way or drop a number"
    )
    long: bool = Field(
        False, description="selection sort written out, 2 to 16 numbers with a heavy tail; min and max do not apply"
    )

    @model_validator(mode="after")
    def _range(self) -> NumberSorting:
        if self.min_numbers > self.max_numbers:
            raise ValueError(f"min_numbers: got {self.min_numbers}, expected at most max_numbers = {self.max_numbers}")
        return self


def number_sorting(options: Mapping[str, Any], seed: int, split: Split) -> list[Row]:
    """Digits to sort, ``<`` upwards and ``>`` downwards: prompt ``634139<``, answer ``133469``; no prompt twice.

    In the ``long`` variant the demonstration takes out the next number again and again and ends with the result:
    ``2139>`` -> ``9:213;3:21;2:1;1:;=9321`` (graded by ``exact`` with ``after: "="``).

    Raises UserError for unknown options, or a ``size`` beyond the number of distinct prompts.
    """
    chosen = options_of(NumberSorting, options, "data.options")
    shares = _LONG_SHARES if chosen.long else ((1.0, chosen.min_numbers, chosen.max_numbers),)
    streams = [_Digits(low, high, _first_seed(seed, split, stream)) for stream, (_, low, high) in enumerate(shares)]
    pick, teach = Random(f"{seed}/{split}/lengths"), Random(f"{seed}/{split}/demonstrations")
    rows: list[Row] = []
    for _ in range(chosen.size):
        stream = pick.choices(streams, [share for share, *_ in shares])[0]
        fresh = stream.next(held_out=split == "eval")
        if fresh is None:
            raise UserError(
                f"data.options.size: got {chosen.size}, but after {len(rows)} tasks no new prompt of {stream.low} to "
                f"{stream.high} numbers was found for {split}; lower size, or raise max_numbers"
            )
        digits, direction = fresh
        completion = None
        if chosen.demonstrations != "none":
            right = chosen.demonstrations == "clean" or teach.random() < chosen.correct_fraction
            completion = demonstration(digits, direction, chosen.long, None if right else teach)
        rows.append(Row(digits + direction, sort(digits, direction), completion))
    return rows


def sort(digits: str, direction: str) -> str:
    return "".join(sorted(digits, reverse=direction == ">"))


def demonstration(digits: str, direction: str, long: bool, mistakes: Random | None = None) -> str:
    """The right response, or with ``mistakes`` one of the two wrong kinds: sorted the wrong way, or one number short."""
    drop = -1
    if mistakes is not None:
        turned = {"<": ">", ">": "<"}[direction]
        if mistakes.random() < _WRONG_DIRECTION and len(set(digits)) > 1:
            direction = turned
        else:
            drop = mistakes.randrange(len(digits))
    ordered = sort(digits, direction)
    result = "".join(digit for place, digit in enumerate(ordered) if place != drop)
    if not long:
        return result
    left, steps = list(digits), []
    for place, digit in enumerate(ordered):
        left.remove(digit)
        if place != drop:
            steps.append(f"{digit}:{''.join(left)};")
    return f"{''.join(steps)}={result}"


class _Digits:
    """Digits and directions of reasoning-gym's ``number_sorting``, each prompt once."""

    def __init__(self, low: int, high: int, seed: int) -> None:
        self.low, self.high = low, high
        gym = _import_reasoning_gym()
        limits = {"min_decimals": 0, "max_decimals": 0, "min_value": -0.49, "max_value": 9.49}  # rounds to the digits 0 to 9
        self._entries = gym.create_dataset("number_sorting", min_numbers=low, max_numbers=high, seed=seed, size=10**7, **limits)
        self._index = 0
        self._seen: set[str] = set()

    def next(self, held_out: bool) -> tuple[str, str] | None:
        """The next new prompt of the wanted side, or None where a thousand tries in a row found none."""
        for _ in range(1000):
            metadata = self._entries[self._index]["metadata"]
            self._index += 1
            digits = "".join(str(abs(int(float(number)))) for number in metadata["original_numbers"])
            direction = "<" if metadata["direction"] == "ascending" else ">"
            prompt = digits + direction
            if is_held_out(prompt) == held_out and prompt not in self._seen:
                self._seen.add(prompt)
                return digits, direction
        return None


class ReasoningGym(Sequence[Row]):
    """A data set of reasoning-gym, each row made when it is asked for.

    The entry is kept in ``columns`` for its scorer.  A row whose question falls to the other side of the split is replaced by
    another index's; ``chat`` makes the question a user's message.
    """

    def __init__(self, name: str, options: Mapping[str, Any], seed: int, split: Split) -> None:
        """Raises UserError for a data set or option that reasoning-gym does not have, naming the nearest."""
        _import_reasoning_gym()
        from reasoning_gym.factory import DATASETS

        require_gym(name, DATASETS)
        config = dict(options)
        self._name = name
        self._split = split
        self._size = config.pop("size", 10_000)
        self._chat = config.pop("chat", False)
        if type(self._size) is not int or self._size < 1 or type(self._chat) is not bool:
            raise UserError(
                f"data.options: got size {self._size!r} and chat {self._chat!r}, expected a positive integer and true or false"
            )
        make, schema = DATASETS[name]
        known = {field.name for field in dataclasses.fields(schema)} - {"seed", "size"}
        if unknown := sorted(set(config) - known):
            near = difflib.get_close_matches(unknown[0], known, 1)
            meant = f"did you mean `{near[0]}`?" if near else f"known: size, chat, {', '.join(sorted(known))}"
            raise UserError(f"data.options: {name} has no option {', '.join(unknown)}; {meant}")
        size = self._size if split == "train" else self._size * _TRIES
        try:
            settings = schema(**config, seed=_first_seed(seed, split, 0), size=size)
            settings.validate()
            self._entries = make(config=settings)
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(f"data.options: reasoning-gym refuses them for {name}: {error}") from error

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        if not 0 <= index < self._size:
            raise IndexError(index)
        for attempt in range(_TRIES):
            entry = self._entries[self._other_index(index, attempt)]
            if is_held_out(entry["question"]) == (self._split == "eval"):
                question = entry["question"]
                prompt = ({"role": "user", "content": question},) if self._chat else question
                return Row(prompt, entry["answer"], None, {"entry": entry, "dataset": self._name})
        raise UserError(
            f"data.source: reasoning_gym:{self._name} with these options has too few distinct questions to hold some out for "
            f"{self._split}; widen the options, or give monitor.eval.source"
        )

    def _other_index(self, index: int, attempt: int) -> int:
        """Evaluation has a block of ``_TRIES`` indices per row; training walks on through its own indices."""
        return index * _TRIES + attempt if self._split == "eval" else (index + attempt * 7919) % self._size


def require_gym(name: str, known: Collection[str], key: str = "data.source") -> None:
    """Raise UserError, with the nearest names, for a data set that reasoning-gym does not have."""
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        meant = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(sorted(known))}"
        raise UserError(f"{key}: got reasoning_gym:{name}, which reasoning-gym does not have; {meant}")


def gym_names() -> set[str]:
    """Names of reasoning-gym's data sets, read from its sources: importing it takes seconds."""
    package = importlib.util.find_spec("reasoning_gym")
    assert package is not None and package.origin is not None, "reasoning-gym is a dependency"
    sources = (file.read_text(encoding="utf-8") for file in Path(package.origin).parent.rglob("*.py"))
    return {first or second for source in sources for first, second in _GYM_NAME.findall(source)}


def _first_seed(seed: int, split: Split, stream: int) -> int:
    return (2 * seed + (split == "eval")) * _SEED_SPACING + stream * _STREAM_SPACING


def _import_reasoning_gym() -> Any:
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
        import reasoning_gym
    return reasoning_gym
