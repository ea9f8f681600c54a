"""The game's rules, its demonstrations, and what each way of playing is worth."""

import asyncio
from random import Random

import pytest

from slipstream.core.records import Status, Task, WeightVersion
from slipstream.core.schema import Data, Evaluation
from slipstream.rollout.environment import Completion
from slipstream.rollout.guess_number import GuessNumber, demonstration, guess_number
from slipstream.rollout.tasks import open_source


def answers(hidden: str, *turns: str, finish: Status = "eos") -> tuple[list[object], float]:
    """What the game says to each turn, and its score at the end."""
    game = GuessNumber(Task(id="t", epoch=0, position=0, prompt="1-7?", answer=hidden))
    version = (WeightVersion(0, 0),)

    def said(text: str) -> Completion:
        return Completion(token_ids=(2,), logprobs=(0.0,), versions=version, kv_versions=version, finish=finish, text=text)

    return [asyncio.run(game.observe(said(text))) for text in turns], game.score


def test_a_wrong_guess_is_answered_by_the_side_and_the_right_one_ends_the_game() -> None:
    assert answers("3", "4", "2", "3") == (["<", ">", None], 1.0)
    assert answers("3", "4", "2", "1") == (["<", ">", ">"], 0.0)
    assert answers("3", " 3 ") == ([None], 1.0)


def test_what_is_no_guess_is_answered_by_a_question_mark() -> None:
    assert answers("3", "", "x", "-3", "3<", "³", "3333") == (["?"] * 6, 0.0)
    assert answers("3", "3", finish="length") == (["?"], 0.0)  # cut off: it might have gone on


def test_halving_finds_each_of_seven_numbers_in_three_guesses() -> None:
    games = [demonstration(hidden, numbers=7, turns=3) for hidden in range(1, 8)]
    assert games[2] == ("4", "<", "2", ">", "3") and games[3] == ("4",)
    assert all(game[-1] == str(hidden) and len(game) <= 5 for hidden, game in enumerate(games, 1))


def test_careless_games_heed_no_answer_and_find_a_third() -> None:
    """Three independent guesses of seven: 1 − (6/7)³ = 0.370; over 4000 games the standard deviation is 0.0076."""
    random = Random(0)
    games = [(hidden, demonstration(hidden, 7, 3, random)) for hidden in range(1, 8) for _ in range(4000 // 7)]
    found = sum(game[-1] == str(hidden) for hidden, game in games) / len(games)
    assert found == pytest.approx(1 - (6 / 7) ** 3, abs=0.025)
    for hidden, game in games[:200]:
        assert list(game[1::2]) == ["<" if hidden < int(guess) else ">" for guess in game[:-1:2]]
    assert any(game[1:3] == ("<", "7") for _, game in games), "a careless guess never goes the wrong way"


def test_tasks_are_one_prompt_with_hidden_numbers_of_a_seed_of_their_own() -> None:
    data = Data(source="builtin:guess_number", options={"size": 2000})
    train, held_out = (open_source(data, 0, split, Evaluation(size=500)) for split in ("train", "eval"))
    tasks = [train.task(0, position) for position in range(2000)]
    assert {task.prompt for task in tasks} == {"1-7?"} and {task.answer for task in tasks} == set("1234567")
    other = [held_out.task(0, position).answer for position in range(500)]
    assert other != [row.answer for row in guess_number(data.options, 0, "train")[:500]]
    # a quarter halves; of the careless, 1/7 + 6/7·(1/7)·… share its first guess: so between 0.25 and 0.45 begin with a 4
    assert 0.25 < sum(task.completion[0] == "4" for task in tasks if task.completion) / 2000 < 0.45
    clean = guess_number({"size": 50, "demonstrations": "clean"}, 0, "train")
    assert all(row.completion and row.completion[-1] == row.answer for row in clean)
    assert all(row.completion is None for row in guess_number({"size": 5, "demonstrations": "none"}, 0, "train"))
    with pytest.raises(ValueError, match=r"data\.options\.number: unknown key; did you mean `numbers`"):
        guess_number({"number": 7}, 0, "train")
