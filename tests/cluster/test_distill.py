"""Whole runs with a teacher: alone, with rewards that are all equal, and resumed; and as advantages beside a reward."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slipstream.core import schema
from slipstream.core.audit import audit
from slipstream.core.rundir import read_jsonl
from slipstream.trainer.model import resolve_model

pytestmark = pytest.mark.cluster
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def runs(start: Start, workshop: Path) -> dict[str, Any]:
    """The teacher is the tiny model of another seed: it knows nothing, but it is not the student."""
    teacher = resolve_model(schema.Model(path="builtin:tiny"), 5, workshop / "models")
    alone = start(
        "alone",
        "algo.name=opd",
        f"distill={{teacher: {teacher}, coefficient: 0.5}}",
        "reward.parts=[{function: exact}]",  # out of reach: every reward is 0
        "schedule.steps=3",
    )
    beside = start("beside", f"distill={{teacher: {teacher}, form: policy_gradient}}", "schedule.steps=2")
    assert (alone.wait(), beside.wait()) == (0, 0), alone.output() + beside.output()
    resumed = start("alone", "schedule.steps=5", resume=True)
    assert resumed.wait() == 0, resumed.output()
    return {"alone": resumed, "beside": beside}


def test_the_records_of_the_runs_hold(runs: dict[str, Any]) -> None:
    for command in runs.values():
        report = audit(command.run)
        assert report.ok, report.problems


def test_a_teacher_alone_needs_no_rewards_and_comes_nearer_after_a_resume_too(runs: dict[str, Any]) -> None:
    metrics = read_jsonl(runs["alone"].run / "metrics.jsonl").records
    assert len(metrics) == 5
    assert {m["reward/mean"] for m in metrics} == {0.0}
    assert runs["alone"].summary()["ledger"]["filtered"] == 0
    kl = [m["distill/kl"] for m in metrics]
    assert all(later < earlier for earlier, later in pairwise(kl)), kl
    assert metrics[0]["loss/distill"] == pytest.approx(0.5 * kl[0], rel=0.05)  # w is 1 but for the engine's rounding
    assert metrics[0]["offpolicy/ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert not any(name.startswith("loss/policy") for m in metrics for name in m)


def test_the_policy_gradient_form_goes_through_the_policy_loss(runs: dict[str, Any]) -> None:
    for line in read_jsonl(runs["beside"].run / "metrics.jsonl").records:
        assert line["distill/kl"] > 0.1 and "loss/policy" in line and "loss/distill" not in line
