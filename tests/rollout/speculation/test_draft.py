"""`slipstream draft train`: a head for a tiny policy, from its own responses; what it refuses, before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.rollout.speculation.eagle3 import Eagle3Head

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
    assert made["samples"] >= 24 and made["tokens"] > 10 * made["samples"]
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
