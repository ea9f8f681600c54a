"""A game of several turns: find a hidden number from 1 to N; a wrong guess is answered by ``<`` (it is lower) or ``>``.

``1-7?`` ``4`` ``<`` ``2`` ``>`` ``3``.  With T turns, halving the range finds any of 2^T − 1 numbers, while guesses that do not
heed the answers find T of N at best.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.core.recipe_problems import options_of
from slipstream.core.records import Task
from slipstream.core.section import Fraction, Positive, Section
from slipstream.rollout.environment import Completion, Environment, Observation
from slipstream.rollout.rows import Row, Split


class GuessNumber(Environment):
    """The environment ``guess_number``: the score is 1 once a turn is the task's answer and nothing else, else 0."""

    score: float = 0.0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if task.answer is None or not task.answer.isdecimal():
            raise ValueError(f"got the answer {task.answer!r}, expected a number; use data.source builtin:guess_number")
        self._hidden = int(task.answer)

    async def observe(self, completion: Completion) -> Observation:
        guess = completion.text.strip()
        if not (guess.isascii() and guess.isdigit() and len(guess) <= 3 and completion.finish in ("eos", "stop")):
            return "?"
        self.score = float(int(guess) == self._hidden)
        return None if self.score else "<" if self._hidden < int(guess) else ">"


class GuessNumberTasks(Section):
    """Options of ``builtin:guess_number``."""

    size: Positive = 20_000
    numbers: Annotated[int, Field(ge=2, le=9)] = Field(7, description="N: the hidden number is one of 1 to N")
    demonstrations: Literal["mixed", "clean", "none"] = "mixed"
    correct_fraction: Fraction = Field(0.25, description="of mixed demonstrations; the others guess without heeding answers")
    turns: Positive = Field(3, description="guesses of a demonstration that does not find the number")


def guess_number(options: Mapping[str, Any], seed: int, split: Split) -> list[Row]:
    """Prompts ``1-7?`` with the hidden number as answer; demonstrations alternate guesses and answers.

    All prompts are the same, so no prompt can be held out: evaluation draws its hidden numbers from a seed of its own.
    Raises UserError for unknown options.
    """
    chosen = options_of(GuessNumberTasks, options, "data.options")
    draw, teach = Random(f"{seed}/{split}/hidden"), Random(f"{seed}/{split}/demonstrations")
    rows = []
    for _ in range(chosen.size):
        hidden, game = draw.randint(1, chosen.numbers), None
        if chosen.demonstrations != "none":
            right = chosen.demonstrations == "clean" or teach.random() < chosen.correct_fraction
            game = demonstration(hidden, chosen.numbers, chosen.turns, None if right else teach)
        rows.append(Row(f"1-{chosen.numbers}?", str(hidden), game))
    return rows


def demonstration(hidden: int, numbers: int, turns: int, careless: Random | None = None) -> tuple[str, ...]:
    """Guesses and the answers to them, until the number is found or after ``turns`` guesses; ``careless`` ones are random."""
    low, high = 1, numbers
    texts: list[str] = []
    for turn in range(turns):
        guess = careless.randint(1, numbers) if careless else (low + high) // 2
        texts.append(str(guess))
        if guess == hidden or turn + 1 == turns:
            break
        texts.append("<" if hidden < guess else ">")
        low, high = (low, guess - 1) if hidden < guess else (guess + 1, high)
    return tuple(texts)
