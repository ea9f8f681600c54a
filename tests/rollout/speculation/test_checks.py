"""Drafts that do not fit are refused before an engine starts, with every reason."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.models import registry

from slipstream.core.speculation import Speculation
from slipstream.rollout.speculation.checks import problems, require_runnable
from slipstream.rollout.speculation.head_checks import ARCHITECTURES, parameters
from slipstream.rollout.speculation.student import DraftModelStudent


def small(method: str = "draft_model", **keys) -> Speculation:
    return Speculation(method=method, draft="d", **keys)


def changed(folder: Path, to: Path, **keys) -> Path:
    """A copy with other keys in its config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **keys}))
    return to


def with_tensors(folder: Path, to: Path, name: str = "model.safetensors", without: str = "", **tensors: torch.Tensor) -> Path:
    """A copy with other weights: some more, or changed, or one left out; ``__`` stands for a point in a name."""
    shutil.copytree(folder, to)
    there = load_file(to / "model.safetensors") | {key.replace("__", "."): tensor for key, tensor in tensors.items()}
    (to / "model.safetensors").unlink()
    save_file({key: tensor for key, tensor in there.items() if key != without}, to / name)
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


LEARNS = {"tts": {"enabled": True}}


def speculating(method: str, learns: bool = False, **keys: object) -> Speculation:
    return Speculation.model_validate({"method": method, "draft": "d", **(LEARNS if learns else {}), **keys})


@pytest.mark.parametrize("learns", [False, True])
def test_heads_that_fit(learns: bool, deep: Path, eagle3_head: Path, dflash_head: Path) -> None:
    assert said(speculating("eagle3", learns), deep, eagle3_head) == {}
    assert said(speculating("dflash", learns), deep, dflash_head) == {}


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(
    ("method", "keys", "says"),
    [
        ("eagle3", {"vocab_size": 128}, "a vocabulary (vocab_size) of 128, expected the target's 64"),
        ("dflash", {"vocab_size": 128}, "a vocabulary (vocab_size) of 128, expected the target's 64"),
        ("eagle3", {"architectures": ["BertModel"]}, "is a BertModel, expected a head of eagle3: one of Eagle3DeepseekV2"),
        ("eagle3", {IDS: [-1, 1, 2]}, "reads layers [-1], expected at most 4 and at least 0"),
        ("eagle3", {IDS: [1, 2, 5]}, "reads layers [5], expected at most 4"),
        ("eagle3", {IDS: [1, 1, 2]}, "expected 3 different ones"),
        ("eagle3", {IDS: [1, 2]}, "expected 3 different ones"),
        ("eagle3", {IDS: ["1", "2", "3"]}, "['1', '2', '3'], expected a list of layer numbers"),
        ("eagle3", {IDS: None}, f"lacks {IDS}, and vLLM's default [2, 2, 1] are not three different ones"),
        ("eagle3", {"intermediate_size": 96}, "has midlayer.mlp.down_proj.weight of shape (64, 128), expected (64, 96)"),
        ("dflash", {"dflash_config": [1, 2]}, "a dflash_config that is [1, 2], expected a mapping"),
        ("dflash", {"dflash_config": {"mask_token_id": 64, "target_layer_ids": [1, 2]}}, "mask_token_id 64, expected a token"),
        ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 4]}}, "reads layers [4], expected at most 3"),
        ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1]}}, "has fc.weight of shape (64, 128)"),
    ],
)
def test_a_head_whose_config_does_not_fit(
    learns: bool, method: str, keys: dict, says: str, deep: Path, eagle3_head: Path, dflash_head: Path, tmp_path: Path
) -> None:
    head = changed(eagle3_head if method == "eagle3" else dflash_head, tmp_path / "head", **keys)
    found = [text for _, text in problems(speculating(method, learns), deep, head, False)]
    assert any(says in text for text in found), found
    assert not any("cannot be read" in text for text in found)


def test_a_head_in_the_place_of_another(deep: Path, eagle3_head: Path, dflash_head: Path) -> None:
    assert "is a DFlashDraftModel, expected a head of eagle3" in str(problems(speculating("eagle3"), deep, dflash_head, False))
    assert "is a LlamaForCausalLMEagle3, expected a head of dflash" in str(
        problems(speculating("dflash"), deep, eagle3_head, False)
    )
    assert "has no tensor of a Medusa head" in said(speculating("medusa"), deep, eagle3_head)["draft"]
    assert "writes no text" in str(problems(speculating("draft_model"), deep, eagle3_head, False))


def test_a_medusa_head_reads_the_targets_states(deep: Path, eagle3_head: Path, tmp_path: Path) -> None:
    blocks = {"blocks__0__layers__0__weight": torch.zeros(64, 64)}
    assert said(speculating("medusa"), deep, with_tensors(eagle3_head, tmp_path / "new", **blocks)) == {}
    old = with_tensors(eagle3_head, tmp_path / "old")
    save_file({"0.0.linear.weight": torch.zeros(32, 32)}, old / "model.safetensors")
    assert "heads of shape (32, 32), expected (64, 64)" in said(speculating("medusa"), deep, old)["draft"]


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_a_head_whose_tensors_do_not_fit(
    learns: bool, method: str, deep: Path, eagle3_head: Path, dflash_head: Path, tmp_path: Path
) -> None:
    head, speculation = eagle3_head if method == "eagle3" else dflash_head, speculating(method, learns)
    lacking = with_tensors(head, tmp_path / "lacking", without="fc.weight")
    assert f"lacks fc.weight, which a head of {method} has" in said(speculation, deep, lacking)["draft"]
    wide = with_tensors(head, tmp_path / "wide", fc__weight=torch.zeros(64, 32))
    assert "has fc.weight of shape (64, 32), expected (64, " in said(speculation, deep, wide)["draft"]
    broken = with_tensors(head, tmp_path / "broken", norm__weight=torch.full((64,), torch.nan))
    assert "has NaN or infinity in norm.weight" in said(speculation, deep, broken)["draft"]
    large = with_tensors(head, tmp_path / "large", more=torch.zeros(1000, 1000))
    assert "expected a draft that costs less" in str(problems(speculation, deep, large, False))


def test_a_draft_vocabulary_is_part_of_the_targets(deep: Path, eagle3_head: Path, tmp_path: Path) -> None:
    head = with_tensors(eagle3_head, tmp_path / "head", d2t=torch.tensor([0] * 63 + [1]))
    assert (
        "maps its tokens (d2t) to 0 to 64, expected tokens of the target's 64"
        in said(speculating("eagle3"), deep, head)["draft"]
    )
    save_file({**load_file(head / "model.safetensors"), "d2t": torch.tensor([0] * 64)}, head / "model.safetensors")
    assert said(speculating("eagle3"), deep, head) == {}


def test_heads_as_they_are_published_are_taken_where_they_do_not_learn(
    deep: Path, eagle3_head: Path, dflash_head: Path, tmp_path: Path
) -> None:
    """No layers named for a target of eight, an embedding of their own, vLLM's other names, no output head, variants."""
    own = {"embed_tokens__weight": torch.zeros(64, 64), "t2d": torch.ones(64, dtype=torch.bool)}
    head = with_tensors(eagle3_head, tmp_path / "head", without="lm_head.weight", **own)
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in load_file(head / "model.safetensors").items()}
    save_file(tensors, head / "model.safetensors")
    assert said(speculating("eagle3"), deep, head) == {}
    eight = changed(deep, tmp_path / "eight", num_hidden_layers=8)
    unnamed = changed(head, tmp_path / "unnamed", **{IDS: None, "architectures": ["LlamaForCausalLM"]})
    assert said(speculating("eagle3"), eight, unnamed) == {}
    assert "the trainable copy is none of" in said(speculating("eagle3", True), eight, unnamed)["tts.enabled"]
    biased = changed(eagle3_head, tmp_path / "biased", attention_bias=True)
    assert said(speculating("eagle3"), deep, biased) == {}
    nested = {"speculators_model_type": "eagle3", "transformer_layer_config": {}, "hidden_size": None}
    assert said(speculating("eagle3"), deep, changed(eagle3_head, tmp_path / "nested", **nested)) == {}
    masked = with_tensors(dflash_head, tmp_path / "masked", **own)
    assert said(speculating("dflash"), deep, masked) == {}
    assert "its trainable copy does not know: embed_tokens.weight" in said(speculating("dflash", True), deep, masked)["draft"]


def test_the_architectures_of_heads_are_those_of_vllm() -> None:
    known = registry._SPECULATIVE_DECODING_MODELS
    files = {"eagle3": ("llama_eagle3", "qwen3_eagle3", "deepseek_eagle3"),
             "dflash": ("qwen3_dflash", "qwen3_dflash2", "laguna_dflash", "lilicorr")}  # fmt: skip
    for method, names in ARCHITECTURES.items():
        assert sorted(names) == sorted(name for name, (file, _) in known.items() if file in files[method])


def test_a_learning_draft_is_read_from_the_files_of_transformers(
    tiny: Path, small_draft: Path, deep: Path, eagle3_head: Path, tmp_path: Path
) -> None:
    head = with_tensors(eagle3_head, tmp_path / "head", "head.safetensors")
    assert said(speculating("eagle3"), deep, head) == {}
    assert "is read from model.safetensors, which" in said(speculating("eagle3", True), deep, head)["tts.enabled"]
    draft = with_tensors(small_draft, tmp_path / "draft", "draft.safetensors")
    assert said(speculating("draft_model"), tiny, draft) == {}
    assert (
        "model.safetensors or model.safetensors.index.json"
        in said(speculating("draft_model", True), tiny, draft)["tts.enabled"]
    )


def test_a_draft_model_whose_weights_do_not_fit(tiny: Path, small_draft: Path, tmp_path: Path) -> None:
    bert = changed(small_draft, tmp_path / "bert", architectures=["BertModel"])
    assert "is a BertModel, which writes no text" in said(small(), tiny, bert)["draft"]
    wide = changed(small_draft, tmp_path / "wide", intermediate_size=96)
    assert "mlp.down_proj.weight of shape (64, 128), expected (64, 96)" in str(problems(small(), tiny, wide, False))
    broken = with_tensors(small_draft, tmp_path / "broken", model__norm__weight=torch.full((64,), torch.inf))
    assert "has NaN or infinity in model.norm.weight" in said(small(), tiny, broken)["draft"]


def test_a_folder_that_breaks_its_readers_is_no_fault_of_ours(
    tiny: Path, small_draft: Path, tmp_path: Path, deep: Path, eagle3_head: Path
) -> None:
    torn = changed(tiny, tmp_path / "torn")
    (torn / "tokenizer.json").write_text('{"version": "1.0", "mod')
    assert f"{torn} cannot be read: " in said(small(), tiny, torn)["draft"]
    dangling = changed(small_draft, tmp_path / "dangling")
    (dangling / "more.safetensors").symlink_to(tmp_path / "nowhere")
    assert f"{dangling} cannot be read: FileNotFoundError: " in said(small(), tiny, dangling)["draft"]
    assert said(small(), tiny, changed(small_draft, tmp_path / "null", text_config=None)) == {}
    listed = changed(eagle3_head, tmp_path / "listed", eagle_config=[1])
    assert "cannot be read: AttributeError" in said(speculating("eagle3"), deep, listed)["draft"]


def test_memory_for_one_request_is_counted_before_the_worker_does(tiny: Path, small_draft: Path) -> None:
    """What the worker counts: 5 · 4 rows over 64 tokens, twice in float32, and the cache of the longest request."""
    each = 20 * 64 * 8 + DraftModelStudent(small_draft, torch.device("cpu"), train="all").prefix_bytes(512)
    for share, fits in ((1.01, True), (0.99, False)):
        tts = {"enabled": True, "max_memory_mib": share * each / 2**20}
        found = dict(problems(speculating("draft_model", tts=tts), tiny, small_draft, False, 512))
        assert (found == {}) is fits
    assert found["tts.max_memory_mib"].startswith("got ") and "a draft cache of 512 tokens" in found["tts.max_memory_mib"]
    with pytest.raises(ValueError, match=r"rollout\.speculation\.tts\.max_memory_mib: got "):
        require_runnable(speculating("draft_model", tts=tts), tiny, small_draft, on_gpu=False, max_length=512)


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_memory_for_one_request_of_a_head_is_counted_before_the_worker_does(
    method: str, deep: Path, request: pytest.FixtureRequest
) -> None:
    """5 · 4 rows over the target's vocabulary, twice, and keys, values and features of 512 tokens."""
    folder = request.getfixturevalue(f"{method}_head")
    config = json.loads((folder / "config.json").read_text())
    vocabulary = json.loads((deep / "config.json").read_text())["vocab_size"]
    read = load_file(folder / "model.safetensors")["fc.weight"].shape[1]
    entries = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] + read
    each = 20 * vocabulary * 8 + 512 * entries * 4
    for share, fits in ((1.01, True), (0.99, False)):
        tts = {"enabled": True, "max_memory_mib": share * each / 2**20}
        found = dict(problems(speculating(method, tts=tts), deep, folder, False, 512))
        assert (found == {}) is fits
    assert "a draft cache of 512 tokens" in found["tts.max_memory_mib"]
