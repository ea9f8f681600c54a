"""A run whose draft learns while it serves, and goes on learning after a resume; a draft that does not fit starts nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from slipstream.cluster.models import CACHE
from slipstream.core.audit import audit
from slipstream.core.rundir import read_jsonl
from slipstream.core.schema import Model
from slipstream.trainer.model import resolve_model

pytestmark = pytest.mark.cluster


def make_draft(folder: Path, vocabulary: int = 64) -> Path:
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2, initializer_range=0.08,
    )  # fmt: skip
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model(Model(path="builtin:tiny"), 0, CACHE) / name, folder)
    return folder


def test_a_draft_learns_through_a_run_and_its_resume(start: Callable[..., Any], workshop: Path) -> None:
    draft = make_draft(workshop / "draft")
    speculation = f"{{method: draft_model, draft: {draft}, tokens: 3, tts: {{enabled: true, lr: 3.0e-3, baseline_rounds: 50}}}}"
    run = start(
        "learning", f"rollout.speculation={speculation}", "rollout.speculation.tts.max_cost_share=1.0", "schedule.steps=4"
    )
    assert run.wait() == 0, run.output()
    drafts = run.summary()["draft"]
    assert (drafts["method"], drafts["learns"], drafts["lossy"], drafts["kills"]) == ("draft_model", True, False, 0)
    assert drafts["updates"] > 5 and drafts["rounds"] > 200 and 1.0 < drafts["acceptance_length"] < 4.0
    assert audit(run.run).ok
    steps = read_jsonl(run.run / "metrics.jsonl").records
    assert sum(step["draft/updates"] for step in steps) == drafts["updates"]
    assert all(0 <= step["draft/lag"] <= 4 for step in steps) and min(step["draft/lag"] for step in steps[1:]) < 3

    def age(step: int) -> int:
        return json.loads((run.run / f"checkpoints/step-{step:08}/drafts/engine-0/draft.json").read_text())["age"]

    assert age(4) >= drafts["updates"]

    again = start("learning", "schedule.steps=5", resume=True)
    assert again.wait() == 0, again.output()
    assert age(5) >= age(4), "the draft began anew"
    assert again.summary()["draft"]["rounds"] > drafts["rounds"]


@pytest.mark.slow
def test_engines_share_what_their_drafts_have_learnt(start: Callable[..., Any], workshop: Path) -> None:
    """Two engines with other requests each: their drafts stay nearer to one another than to where they began."""
    draft = make_draft(workshop / "shared")
    tts = "tts: {enabled: true, lr: 3.0e-3, baseline_rounds: 20, max_cost_share: 1.0, share_every_s: 0.5}"
    speculation = f"{{method: draft_model, draft: {draft}, tokens: 3, {tts}}}"
    run = start("sharing", f"rollout.speculation={speculation}", "rollout.engines=2", "schedule.steps=8")
    assert run.wait() == 0, run.output()
    assert len(run.events("drafts_shared")) >= 3
    assert audit(run.run).ok and run.summary()["draft"]["kills"] == 0
    folders = sorted((run.run / "checkpoints" / "step-00000008" / "drafts").iterdir())
    assert [folder.name for folder in folders] == ["engine-0", "engine-1"]
    one, other = (load_file(folder / "draft.safetensors") for folder in folders)
    first = load_file(draft / "model.safetensors")
    apart = sum((one[f"draft.{name}"] - other[f"draft.{name}"]).abs().sum() for name in first)
    learnt = sum((one[f"draft.{name}"] - first[name]).abs().sum() for name in first)
    print("apart", apart, "learnt", learnt, len(run.events("drafts_shared")))
    assert apart < 0.7 * learnt, "drafts that learn alone drift apart as far as they go"


def test_a_draft_that_does_not_fit_starts_nothing(start: Callable[..., Any], workshop: Path) -> None:
    draft = make_draft(workshop / "other", vocabulary=65)
    run = start("refused", f"rollout.speculation={{method: draft_model, draft: {draft}, rejection: block}}")
    assert run.wait() == 2
    said = " ".join(run.output().split())
    assert "rollout.speculation.draft" in said and "a vocabulary of 65, expected the target's 64" in said
    assert "rollout.speculation.rejection: got block" in said
    assert not run.run.exists()
