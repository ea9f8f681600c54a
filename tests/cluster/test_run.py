"""Whole runs with real Ray, vLLM and DeepSpeed: an asynchronous one, a synchronous one beside it, and a resume."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.cluster.cli import app
from slipstream.cluster.models import CACHE
from slipstream.core.audit import audit
from slipstream.core.rundir import RunDirectory, read_jsonl
from slipstream.trainer.model import resolve_model

pytestmark = pytest.mark.cluster
Start = Callable[..., Any]
STEPS = 9


@pytest.fixture(scope="module")
def pair(start: Start, workshop: Path) -> dict[str, Any]:
    """Two runs at the same time, each with a Ray of its own: ``free`` (PPO) may lag by two, ``sync`` (GRPO) not at all.

    Half of what ``sync`` is given cannot be graded, and two of its prompts are too long.
    """
    digits = [f"{a}{b}{c}<" for b in range(4) for c in range(4) for a in range(1, 10)]
    rows = [{"prompt": prompt, "answer": "".join(sorted(prompt[:-1]))} for prompt in ("7" * 80, *digits, "8" * 80)]
    (workshop / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    free = start(
        "free",
        "data.options={size: 2000, long: true, demonstrations: none}",
        "schedule={steps: 9, groups_per_step: 6, group_size: 6}",
        "algo={name: ppo, critic: {warmup_batches: 1, optimizer: {lr: 1.0e-3}}}",
        "algo.kl={coefficient: 0.05, target: 2.0, horizon: 100}",
        "rollout.max_num_seqs=12",  # slower than the learner, so that weights arrive in the middle of responses
        "checkpoint.keep=20",
        "monitor.eval={every: 4, size: 16}",
    )
    sync = start(
        "sync",
        "data={source: tasks.jsonl, shuffle: false}",
        "schedule={steps: 3, max_staleness: 0}",
        "algo.correction.reject=[icepop, geometric, opsm]",
        "reward.parts=[{function: 'scores:faulty'}]",
    )
    free.until_commits(1)
    second = subprocess.run(
        [sys.executable, "-m", "slipstream.cluster.cli", "resume", "runs/free"], cwd=workshop, capture_output=True, text=True
    )
    return {"free": free, "sync": sync, "second": second, "codes": (free.wait(), sync.wait())}


def samples_of(run: Path) -> list[dict[str, Any]]:
    return read_jsonl(run / "samples.jsonl").records


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return read_jsonl(run / "metrics.jsonl").records


def test_both_runs_complete_and_leave_nothing_behind(pair: dict[str, Any]) -> None:
    assert pair["codes"] == (0, 0), pair["free"].output() + pair["sync"].output()
    for name in ("free", "sync"):
        command = pair[name]
        assert command.summary()["status"] == "completed" and command.summary()["error"] is None
        assert command.survivors(20.0) == [] and command.staged() == []
        assert (command.run / "report.html").stat().st_size > 10_000
    assert pair["free"].summary()["version"] == STEPS and pair["sync"].summary()["version"] == 3


def test_a_run_is_written_by_one_process(pair: dict[str, Any]) -> None:
    assert pair["second"].returncode == 2 and "is being written by process" in " ".join(pair["second"].stderr.split())


@pytest.mark.parametrize("name", ["free", "sync"])
def test_the_audit_holds(pair: dict[str, Any], name: str) -> None:
    report = audit(pair[name].run)
    assert report.ok, report.problems
    assert report.figures["trained_token_max"] <= report.figures["bound"]


def test_the_ledger_adds_up(pair: dict[str, Any]) -> None:
    """9 steps of 6 groups of 6: 324 samples were in a batch, and nothing is left over at the end."""
    ledger = pair["free"].summary()["ledger"]
    assert ledger["trained"] + ledger["stale"] >= STEPS * 36
    assert ledger["in_flight"] == ledger["ready"] == ledger["training"] == 0
    assert ledger["dispatched"] == sum(n for state, n in ledger.items() if state != "dispatched")
    assert len(samples_of(pair["free"].run)) == STEPS * 36


def test_rollouts_never_stop_for_the_weights(pair: dict[str, Any]) -> None:
    """Responses that began under one version and ended under another, and were trained; evaluations before, between, after."""
    run = pair["free"].run
    mixed = [s for s in samples_of(run) if len({v for v, *_ in s["versions"]}) > 1 and s["outcome"] == "trained"]
    assert mixed, "no trained response has two versions"
    assert max(metric["staleness/token_max"] for metric in metrics_of(run)) >= 1
    evaluations = [event["step"] for event in pair["free"].events("eval")]
    assert sorted(evaluations) == [0, 4, 8, STEPS]
    assert pair["free"].summary()["weights"]["publishes"] == STEPS + 1


def weights_of(run: Path, version: str) -> Path:
    """The folder with the weights of ``version``: a checkpoint, or the model that the run began with."""
    if version == "0.0":
        return resolve_model(RunDirectory.open(run).recipe().model, 0, CACHE)
    return run / "checkpoints" / f"step-{int(version.removeprefix('0.')):08d}" / "learner" / "model"


def test_engine_and_learner_agree_on_the_running_job(pair: dict[str, Any]) -> None:
    """log π_b of what one version wrote = log softmax(logits / 0.7) of that version's weights, by plain transformers."""
    run = pair["free"].run
    pure = defaultdict(list)
    for sample in samples_of(run):
        wrote = {version for version, *_ in sample["versions"] + sample["kv_versions"]}
        if len(wrote) == 1:
            pure[wrote.pop()].append(sample)
    worst, tokens = 0.0, 0
    for version, samples in pure.items():
        model = AutoModelForCausalLM.from_pretrained(weights_of(run, version), dtype=torch.float32)
        for sample in samples:
            ids, start = torch.tensor(sample["prompt_ids"] + sample["token_ids"]), len(sample["prompt_ids"])
            with torch.no_grad():
                logits = model(ids[None]).logits[0, start - 1 : -1]
            expected = torch.log_softmax(logits / 0.7, -1).gather(1, ids[start:, None])[:, 0]
            worst = max(worst, float((torch.tensor(sample["behaviour_logprobs"]) - expected).abs().max()))
            tokens += len(expected)
    print(f"engine and learner differ by {worst:.1e} at most, over {tokens} tokens of versions {sorted(pure)}")
    assert len(pure) >= 3 and tokens >= 5000, (sorted(pure), tokens)
    assert worst <= 1e-4


def test_the_last_checkpoint_exports(pair: dict[str, Any], workshop: Path) -> None:
    out = workshop / "exported"
    app(["export", str(pair["free"].run), str(out)], standalone_mode=False)
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(out).parameters()) > 400_000
    assert AutoTokenizer.from_pretrained(out)("12<")["input_ids"][-3:] == [5, 6, 47]


def test_synchronous_training_is_on_policy(pair: dict[str, Any]) -> None:
    lines = metrics_of(pair["sync"].run)
    assert len(lines) == 3
    for metric in lines:
        assert metric["staleness/token_max"] == 0 and set(metric["staleness/token_hist"]) == {"0"}
        assert metric["staleness/kv_mean"] == 0 and metric["staleness/versions_per_sample_max"] == 1
        assert abs(metric["offpolicy/ratio_mean"] - 1) <= 1e-5 and metric["offpolicy/ratio_max"] - 1 <= 1e-5
        assert abs(metric["offpolicy/ratio_truncated_mean"] - 1) <= 1e-5 and metric["offpolicy/ess"] >= 1 - 1e-6
        for nothing in ("masked_frac", "clip_frac", "inner_step", "inner_kl"):  # although three rejections look on
            assert abs(metric[f"offpolicy/{nothing}"]) <= 1e-6
    for sample in samples_of(pair["sync"].run):
        assert [v for v, *_ in sample["versions"]] == [sample["assembled_at"]]


def test_what_cannot_be_graded_is_counted_and_the_run_goes_on(pair: dict[str, Any]) -> None:
    failed = pair["sync"].events("failed")
    assert {event["reason"] for event in failed} == {"scores:faulty/raised", "scores:faulty/wrong_length"}
    assert {event["detail"] for event in failed} == {
        *(f"RuntimeError: no opinion on {digit}" for digit in "123"),
        "got 1 scores, expected 4",
    }
    assert pair["sync"].summary()["ledger"]["failed"] == 4 * len(failed)
    assert {s["prompt"][0] for s in samples_of(pair["sync"].run)} <= set("6789"), "no reward of 0 for what failed"


def test_prompts_that_do_not_fit_are_left_out_and_counted(pair: dict[str, Any]) -> None:
    """128 tokens of context minus 96 of response leave 32; the first prompt has 80, and the last one is not reached."""
    assert [metric["data/skipped"] for metric in metrics_of(pair["sync"].run)] == [1, 1, 1]
    assert all(len(s["prompt_ids"]) <= 32 for s in samples_of(pair["sync"].run))


@pytest.fixture(scope="module")
def resumed(pair: dict[str, Any], start: Start, workshop: Path) -> Any:
    """A copy of ``free``, two steps further."""
    shutil.copytree(pair["free"].run, workshop / "runs" / "further")
    command = start("further", f"schedule.steps={STEPS + 2}", resume=True)
    assert command.wait() == 0, command.output()
    return command


def test_a_resume_goes_on_where_the_run_ended(pair: dict[str, Any], resumed: Any) -> None:
    before, after = pair["free"].summary(), resumed.summary()
    assert (after["status"], after["version"], after["faults"]["learner_restarts"]) == ("completed", STEPS + 2, 1)
    (start_event,) = resumed.news("start")
    assert after["weights"]["publishes"] == before["weights"]["publishes"] + 3, "as it began, and after both steps"
    assert (start_event["attempt"], start_event["resumed_from"]) == (1, STEPS)
    assert [e["version"] for e in resumed.news("commit")] == [f"1.{STEPS + 1}", f"1.{STEPS + 2}"]
    fresh = [s for s in samples_of(resumed.run) if s["batch"] > STEPS]
    assert len(fresh) == 72 and all(v.startswith("1.") for s in fresh for v, *_ in s["versions"])
    assert after["ledger"]["dispatched"] >= before["ledger"]["dispatched"] + 72
    assert after["eval"]["before"] == before["eval"]["before"], "the score before the training is that of the first attempt"
    assert not {s["sample_id"] for s in fresh} & {s["sample_id"] for s in samples_of(pair["free"].run)}, "the data goes on too"
    report = audit(resumed.run)
    assert report.ok and report.figures["resumes"] == 1, report.problems
    assert resumed.survivors(20.0) == [] and resumed.staged() == []


def test_the_critic_and_the_adaptive_kl_go_on_across_the_resume(resumed: Any) -> None:
    """One batch of warm-up, in which the coefficient waits, then both models train.  36 responses, target 2, horizon 100: each
    further coefficient follows from the one before it and the KL observed with it, also where the second attempt begins."""
    lines = metrics_of(resumed.run)
    assert len(lines) == STEPS + 2
    assert ["loss/policy" in line for line in lines] == [False] + [True] * (STEPS + 1)
    assert all(line["critic/loss"] > 0 and line["critic/lr"] == 1e-3 for line in lines)
    assert lines[0]["critic/value_mean"] == 0.0 and lines[0]["kl/coefficient"] == 0.05
    assert lines[1]["kl/coefficient"] == 0.05
    for before, after in pairwise(lines[1:]):
        error = min(max(before["reward/kl"] / 2.0 - 1, -0.2), 0.2)
        assert after["kl/coefficient"] == pytest.approx(before["kl/coefficient"] * (1 + error * 36 / 100))
    assert all(sample["advantage"] is None for sample in samples_of(resumed.run))
