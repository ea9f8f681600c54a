"""A whole run of several turns, against an environment of the user's that fails now and then, with KV entries recomputed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.audit import audit
from slipstream.core.rundir import read_jsonl

pytestmark = pytest.mark.cluster
HOST = '''
from slipstream.rollout.environment import Environment, ToolError

class Host(Environment):
    """Hot and cold; fails on the number 7, and the policy's first turn is always an error."""

    def __init__(self, task, *, word):
        super().__init__(task)
        self.word, self.turns = word, 0

    def observe(self, turn):
        self.turns, self.score = self.turns + 1, sum(turn.token_ids) % 11 / 10
        if self.task.answer == "7":
            raise LookupError("nobody hides at 7")
        if self.turns == 1:
            raise ToolError("say that again")
        return self.word
'''


@pytest.fixture(scope="module")
def run(start: Callable[..., Any], workshop: Path) -> Any:
    (workshop / "host.py").write_text(HOST)
    command = start(
        "turns",
        "data={source: 'builtin:guess_number'}",
        "reward.parts=[{function: environment}]",
        "rollout.environment={name: 'host:Host', options: {word: cold}, max_turns: 3}",
        "rollout.sampling={max_tokens: 24, stop: ['1', '2', '3', '4', '5', '6']}",
        "schedule={steps: 4, kv_on_update: recompute, publish_every: 2}",
        "monitor.eval.size=14",
    )
    assert command.wait() == 0, command.output()
    return command


def spread(spans: list[list[Any]]) -> list[Any]:
    return [value for value, start, end in spans for _ in range(end - start)]


def test_the_records_of_the_run_hold(run: Any) -> None:
    report = audit(run.run)
    assert report.ok, report.problems
    assert run.survivors(20.0) == [] and run.staged() == []
    assert '<span class="observed"' in (run.run / "report.html").read_text()


def test_weights_are_published_at_the_start_and_every_second_step(run: Any) -> None:
    assert [event["version"] for event in run.events("confirmed")] == ["0.0", "0.2", "0.4"]
    assert len(run.events("commit")) == 4


def test_what_the_environment_cannot_answer_fails_its_groups_and_evaluations(run: Any) -> None:
    failed = run.events("failed")
    assert failed and {event["reason"] for event in failed} == {"environment/raised"}
    assert all("LookupError: nobody hides at 7" in event["detail"] for event in failed), failed
    assert run.summary()["ledger"]["failed"] == 4 * len(failed)
    for evaluation in run.events("eval"):
        assert evaluation["failed"] > 0 and evaluation["n"] + evaluation["failed"] == 14


def test_observations_are_in_the_samples_without_weight(run: Any) -> None:
    """A token per character: ``error: say that again`` is 6 + 1 + 14 = 21, ``cold`` 4."""
    samples = read_jsonl(run.run / "samples.jsonl").records
    lengths = set()
    for sample in samples:
        mask, weights = spread(sample["loss_mask"]), spread(sample["weights"])
        assert all(weight == 0 for mine, weight in zip(mask, weights, strict=True) if not mine)
        assert all(logprob == 0 for mine, logprob in zip(mask, sample["behaviour_logprobs"], strict=True) if not mine)
        lengths |= {end - start for mine, start, end in sample["loss_mask"] if not mine}
        assert spread(sample["kv_versions"]) == spread(sample["versions"])
    assert lengths == {21, 4}
    assert {"length", "turns"} <= {sample["status"] for sample in samples}
