"""The ``calculator`` environment: what the policy writes between two markers is worked out, and the result is what it reads."""

from __future__ import annotations

import re
from fractions import Fraction

from slipstream.core.records import Task
from slipstream.rollout.environment import Completion, Environment, Observation, ToolError

MOST_CHARACTERS = 200
MOST_DIGITS = 50
"""Of a number, and of numerator and denominator of every result on the way."""

_TOKENS = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|([-+*/()]))")
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})


class Calculator(Environment):
    """A turn without an expression ends the episode: it is the answer."""

    def __init__(self, task: Task, *, opening: str, closing: str) -> None:
        super().__init__(task)
        self._expression = re.compile(f"{re.escape(opening)}(.*?){re.escape(closing)}", re.DOTALL)

    async def observe(self, completion: Completion) -> Observation:
        found = self._expression.findall(completion.text)
        return f"={show(evaluate(found[-1]))}" if found else None


def evaluate(expression: str) -> Fraction:
    """The exact value of ``+ - * /`` (or ``× ÷ −``), parentheses, signs and decimal numbers: ``"2*(3+4)/7"`` is 2.

    Raises ToolError for anything else, a division by zero, or numbers beyond ``MOST_DIGITS``.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters, at most {MOST_CHARACTERS} are allowed")
    parser = _Parser(_tokens(expression.translate(_SPELLINGS).strip()))
    value = parser.sum()
    if parser.next is not None:
        raise ToolError(f"{parser.next} was not expected there")
    return value


def show(value: Fraction) -> str:
    """``7``, ``-0.5``, or ten significant digits where a decimal fraction does not end: ``0.3333333333``."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _tokens(text: str) -> list[str]:
    tokens, place = [], 0
    while place < len(text):
        match = _TOKENS.match(text, place)
        if match is None:
            raise ToolError(f"{text[place:].lstrip()[:1]!r} is no number, operator or parenthesis")
        tokens.append(match[1] or match[2])
        place = match.end()
    return tokens


class _Parser:
    """Recursive descent; ``MOST_CHARACTERS`` bounds its depth."""

    def __init__(self, tokens: list[str]) -> None:
        self._left = tokens[::-1]

    @property
    def next(self) -> str | None:
        return self._left[-1] if self._left else None

    def sum(self) -> Fraction:
        value = self._product()
        while self.next in ("+", "-"):
            sign = 1 if self._left.pop() == "+" else -1
            value = _bounded(value + sign * self._product())
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self.next in ("*", "/"):
            operator, other = self._left.pop(), self._factor()
            if operator == "/" and other == 0:
                raise ToolError("division by zero")
            value = _bounded(value * other if operator == "*" else value / other)
        return value

    def _factor(self) -> Fraction:
        if self.next is None:
            raise ToolError("the expression ends too early")
        token = self._left.pop()
        if token in ("+", "-"):
            return self._factor() if token == "+" else -self._factor()
        if token == "(":
            value = self.sum()
            if self.next != ")":
                raise ToolError("a parenthesis is not closed")
            self._left.pop()
            return value
        if token in ("*", "/", ")"):
            raise ToolError(f"{token} was not expected there")
        return _bounded(Fraction(token))


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MOST_DIGITS:
        raise ToolError(f"a number has more than {MOST_DIGITS} digits")
    return value
