"""Drafts that do not fit are refused before an engine starts, with every reason."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.core.speculation import Speculation
from slipstream.rollout.speculation.checks import parameters, problems, require_runnable


def small(method: str = "draft_model", **keys) -> Speculation:
    return Speculation(method=method, draft="d", **keys)


def changed(folder: Path, to: Path, **keys) -> Path:
    """A copy with other keys in its config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **keys}))
    return to


def said(speculation: Speculation, target: Path, draft: Path | None, on_gpu: bool = False) -> dict[str, str]:
    return dict(problems(speculation, target, draft, on_gpu))


def test_a_draft_that_fits(tiny: Path, small_draft: Path) -> None:
    require_runnable(small(), tiny, small_draft, on_gpu=False)
    require_runnable(Speculation(method="ngram"), tiny, None, on_gpu=False)
    require_runnable(Speculation(), tiny, None, on_gpu=False)


def test_everything_at_once(tiny: Path, tmp_path: Path, small_draft: Path) -> None:
    """Another vocabulary, more parameters, and a rejection that the CPU does not have."""
    draft = changed(small_draft, tmp_path / "draft", vocab_size=65)
    save_file({"big": torch.zeros(1000, 1000)}, draft / "more.safetensors")
    with pytest.raises(ValueError) as refused:
        require_runnable(small(rejection="block"), tiny, draft, on_gpu=False)
    lines = str(refused.value).splitlines()
    assert len(lines) == 3 and all(line.startswith("rollout.speculation.") for line in lines)
    assert "vLLM's CPU kernels have no other" in lines[0]
    assert "a vocabulary of 65, expected the target's 64" in lines[1] and "universal: true" in lines[1]
    assert f"has {parameters(draft):,} parameters" in lines[2]


def test_folders_that_are_no_model(tiny: Path, tmp_path: Path, small_draft: Path) -> None:
    assert "is no folder" in said(small("eagle3"), tiny, tmp_path / "nowhere")["draft"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no readable config.json" in said(small(), tiny, empty)["draft"]
    (empty / "config.json").write_text("{}")
    assert "has no *.safetensors" in said(small(), tiny, empty)["draft"]
    torn = changed(small_draft, tmp_path / "torn")
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "weights that do not load" in said(small(), tiny, torn)["draft"]


def test_another_tokenizer_needs_the_universal_option(tiny: Path, tmp_path: Path) -> None:
    """The same 64 entries with two of them swapped: the same size, and yet another vocabulary."""
    other = changed(tiny, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "differs from the target's in 2 tokens" in said(small(), tiny, other)["draft"]
    assert said(small(universal=True), tiny, other) == {}


def test_universal_needs_the_drafts_tokenizer(tiny: Path, small_draft: Path) -> None:
    assert "no tokenizer to map tokens by" in said(small(universal=True), tiny, small_draft)["universal"]


def test_heads_must_fit_the_targets_states(tiny: Path, tmp_path: Path, small_draft: Path) -> None:
    """The draft's states are 64 wide and the target's 128; the target has 2 layers."""
    eagle = changed(small_draft, tmp_path / "eagle", eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    found = [text for key, text in problems(small("eagle3"), tiny, eagle, False)]
    assert any("width 64, expected the target's 128" in text for text in found)
    assert any("reads layers [3], expected at most 2" in text for text in found)
    found = [text for key, text in problems(small("dflash"), tiny, small_draft, False)]
    assert any("lacks dflash_config.mask_token_id, dflash_config.target_layer_ids" in text for text in found)


def test_next_token_layers_must_be_there(tiny: Path, tmp_path: Path) -> None:
    assert "has no layers that predict further tokens" in said(Speculation(method="mtp"), tiny, None)["method"]
    assert said(Speculation(method="mtp"), changed(tiny, tmp_path / "mtp", num_nextn_predict_layers=1), None) == {}


def test_suffix_says_what_to_install(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install arctic-inference" in said(Speculation(method="suffix"), tiny, None)["method"]
