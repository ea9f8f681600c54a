"""What a user sees while waiting, and at the end."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from slipstream.cluster.evaluation import EvalResult, score
from slipstream.cluster.progress import Display, Waiting, final_table, line
from slipstream.core.records import Trajectory, WeightVersion
from slipstream.core.schema import Data, Model, Recipe, Schedule, WarmStart

RECIPE = Recipe(
    name="trial",
    model=Model(path="builtin:tiny"),
    data=Data(source="builtin:number_sorting"),
    warm_start=WarmStart(steps=850),
    schedule=Schedule(steps=60),
)


def snapshot(stage: str, step: int = 0, **metrics: float) -> dict[str, Any]:
    ledger = {"in_flight": 0, "trained": 0, "stale": 0, "filtered": 0}
    return {
        "stage": stage, "step": step, "warm_step": 7, "version": "0.1", "confirmed": "0.1", "ledger": ledger,
        "metrics": metrics, "evaluations": [],
    }  # fmt: skip


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "status": "completed", "version": 60, "steps": 60, "wall_s": 109.4, "start_s": 40.2,
        "eval": {"before": None, "after": None, "n": 0, "metric": None},
        "staleness": {
            "token_mean": 0.5, "trained_token_max": 2, "bound": 2, "masked_frac": 0.0, "versions_per_sample_max": 1
        },
        "ledger": {"dispatched": 8}, "throughput": {"rollout_tokens_per_s": 1.0, "trained_tokens_per_s": 1.0},
        "idle": {"learner": 0.0, "rollout": 0.0}, "weights": {"publishes": 1, "pause_s_p50": 0.0}, **changes,
    }  # fmt: skip


def shown(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_final_table_tells_the_start_apart_and_counts_one_version() -> None:
    told = shown(final_table(summary()))
    assert "60 of 60 in 109 s (start 40 s)" in told and "up to 1 version in one response" in told
    assert "60 of 60 in 109 s " in shown(final_table(summary(start_s=None)))


def test_speeds_have_no_exponents() -> None:
    told = line(snapshot("training", 3, **{"throughput/rollout_tokens_per_s": 2260.4, "reward/mean": 0.71234}), RECIPE)
    assert "tok/s 2260" in told and "reward 0.712" in told


@pytest.mark.parametrize("terminal", [True, False])
def test_every_stage_says_what_is_awaited(terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=terminal)
    stages = {
        "starting": "starting the engines and the learner",
        "warm start": "warm start",
        "publishing weights": "publishing weights",
        "evaluating": "evaluating",
        "training": "training" if not terminal else "trial",
    }
    with Display(RECIPE, console=console) as display:
        seen = console.file.getvalue() if not terminal else None  # type: ignore[attr-defined]
        assert terminal or "starting Ray" in seen
        for stage, expected in stages.items():
            console.file.truncate(0)
            display.update(snapshot(stage))
            if display._live is not None:
                display._live.refresh()
            told = console.file.getvalue().strip("\0")  # type: ignore[attr-defined]
            assert expected in told, (stage, told)
            assert ("0/60" in told) == (stage == "training"), "no bar of steps before there are any"
            assert ("0:00:0" in told) == terminal, "a running clock"


def test_waiting_tells_each_thing_once() -> None:
    console = Console(file=io.StringIO(), width=120)
    with Waiting(console) as waiting:
        for what in ("starting Ray", "starting Ray", "sampling 256 answers"):
            waiting.say(what)
    assert console.file.getvalue() == "starting Ray ...\nsampling 256 answers ...\n"  # type: ignore[attr-defined]


def test_a_score_has_its_standard_error() -> None:
    """Rewards 1, 1, 1, 0: variance 0.25 (n − 1), so 0.5 / √4."""

    def answer(reward: float) -> Trajectory:
        v = (WeightVersion(0, 0),)
        return Trajectory(
            sample_id="a#0", prompt_ids=(1,), token_ids=(2,), loss_mask=(True,), behaviour_logprobs=(-0.1,), policy_versions=v,
            kv_versions=v, status="eos", text="", reward=reward,
        )  # fmt: skip

    result = score([answer(r) for r in (1.0, 1.0, 1.0, 0.0)], 0, 0, 1.0)
    assert (result.score, result.standard_error) == (0.75, 0.25)
    assert score([answer(1.0)], 0, 0, 1.0).standard_error is None
    event = result.as_dict()
    del event["standard_error"]
    assert EvalResult.of(event).score == 0.75, "a resumed run of before"
