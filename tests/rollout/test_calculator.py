"""The calculator works out what it should, and refuses the rest in words for the policy."""

import asyncio
from fractions import Fraction

import pytest

from slipstream.core.records import Task, WeightVersion
from slipstream.core.schema import Environment as Settings
from slipstream.rollout.calculator import MOST_CHARACTERS, evaluate, show
from slipstream.rollout.environment import Completion, ToolError
from slipstream.rollout.environments import Environments


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("2-3-4", -5),  # from the left: (2 − 3) − 4
        ("24/4/3", 2),
        ("2*-3", -6),
        ("-(2+1)", -3),
        (" 7 ÷ 2 × 4 − 1 ", 13),
        ("0.1+0.2", Fraction(3, 10)),  # exact, where floats would say 0.30000000000000004
        (".5*4", 2),
        ("1/3*3", 1),
        ("(" * 60 + "7" + ")" * 60, 7),
        ("-" * 199 + "1", -1),
    ],
)
def test_expressions_have_their_exact_value(expression: str, value: Fraction) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "ends too early"),
        ("2+", "ends too early"),
        ("(2+3", "a parenthesis is not closed"),
        ("2)", r"\) was not expected there"),
        ("*2", r"\* was not expected there"),
        ("2 3", "3 was not expected there"),
        ("1/(2-2)", "division by zero"),
        ("2**3", r"\* was not expected there"),
        ("__import__('os')", "'_' is no number"),
        ("1,000", "',' is no number"),
        ("1e9", "'e' is no number"),
        ("(" * 200, "ends too early"),
        ("1" * (MOST_CHARACTERS + 1), "201 characters, at most 200"),
        ("9" * 60, "more than 50 digits"),
        ("*".join(["9999999999"] * 6), "more than 50 digits"),
        ("/".join(["1", *["7777777777"] * 6]), "more than 50 digits"),
    ],
)
def test_everything_else_is_an_error_in_words(expression: str, problem: str) -> None:
    with pytest.raises(ToolError, match=problem):
        evaluate(expression)


def test_results_are_short() -> None:
    assert [show(Fraction(n, d)) for n, d in ((14, 1), (-1, 2), (1, 3), (10**12, 1))] == [
        "14",
        "-0.5",
        "0.3333333333",
        "1000000000000",
    ]


def test_the_last_expression_of_a_turn_is_answered_and_a_turn_without_one_is_the_end() -> None:
    environments = Environments(Settings(name="calculator"))
    marked = Environments(Settings(name="calculator", options={"opening": "[", "closing": "]"}))
    version = (WeightVersion(0, 0),)

    def answer(of: Environments, text: str) -> object:
        turn = Completion(token_ids=(2,), logprobs=(0.0,), versions=version, kv_versions=version, finish="eos", text=text)
        return asyncio.run(of.observe(of.open(Task(id="t", epoch=0, position=0, prompt="?")), turn))

    assert answer(environments, "first <calc>1+1</calc>, then <calc>6*7</calc>") == "=42"
    assert answer(environments, "<calc>6*</calc>") == "error: the expression ends too early"
    assert answer(environments, "It is 42.") is None
    assert answer(environments, "<calc>6*7") is None
    assert answer(marked, "[6*7]") == "=42"
