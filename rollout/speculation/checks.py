"""Whether a draft fits its target and this machine, before an engine starts: everything that is wrong, at once."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer

from slipstream.core.mistakes import UserError
from slipstream.core.section import Problems
from slipstream.core.speculation import Speculation
from slipstream.rollout.speculation.head_student import unsupported

_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_NEXT_TOKEN_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_predict")
_ARCTIC = "arctic-inference==0.1.1"


def require_runnable(speculation: Speculation, target: Path, draft: Path | None, *, on_gpu: bool) -> None:
    """Raise UserError with every reason why ``target`` cannot be served with these drafts on this machine."""
    found = [] if not speculation.on else problems(speculation, target, draft, on_gpu)
    if found:
        raise UserError("\n".join(f"rollout.speculation.{key}: {problem}" for key, problem in found))


def problems(speculation: Speculation, target: Path, draft: Path | None, on_gpu: bool) -> Problems:
    """What is wrong, as (key, problem).  ``draft`` is the folder that ``speculation.draft`` means, where there is one."""
    found = _of_device(speculation, on_gpu)
    text = _config(target)
    if draft is None:
        if speculation.method == "mtp" and not any(text.get(key) for key in _NEXT_TOKEN_LAYERS):
            found.append(("method", f"got mtp, but {target} has no layers that predict further tokens; give a draft"))
        return found
    lacking = _lacking(draft)
    if lacking:
        return [*found, ("draft", f"{draft} {lacking}; expected a folder with config.json and *.safetensors")]
    own = _config(draft)
    check = {"draft_model": _of_model, "eagle3": _of_head, "dflash": _of_head}.get(speculation.method)
    return found + (check(speculation, (target, text), (draft, own)) if check else [])


def _of_device(speculation: Speculation, on_gpu: bool) -> Problems:
    found: Problems = []
    if not on_gpu and speculation.rejection != "standard":
        found.append(("rejection", f"got {speculation.rejection}, expected standard: vLLM's CPU kernels have no other"))
    if on_gpu and speculation.lookahead == "dynamic":
        found.append(("lookahead", "got dynamic, expected fixed: times of a GPU's rounds are not measured yet"))
    if speculation.method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        found.append(("method", f"got suffix, which needs Arctic Inference: `pip install {_ARCTIC}`; ngram needs nothing"))
    return found


def _lacking(folder: Path) -> str | None:
    """Why the folder holds no model, or None."""
    if not folder.is_dir():
        return "is no folder"
    try:
        if not isinstance(json.loads((folder / "config.json").read_text()), dict):
            return "has a config.json that is no mapping"
    except (OSError, ValueError) as problem:
        return f"has no readable config.json ({problem})"
    if not any(folder.glob("*.safetensors")):
        return "has no *.safetensors"
    try:
        parameters(folder)
    except SafetensorError as problem:
        return f"has weights that do not load ({problem})"
    return None


def _config(folder: Path) -> dict[str, Any]:
    """config.json, of the text part where the model has several."""
    plain = json.loads((folder / "config.json").read_text())
    return plain.get("text_config", plain)


def parameters(folder: Path) -> int:
    """Elements of all tensors of a folder's safetensors, read off their headers."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


Place = tuple[Path, dict[str, Any]]
"""A model's folder and its config."""


def _of_model(speculation: Speculation, target: Place, draft: Place) -> Problems:
    """A whole model as draft: its vocabulary, and whether it is smaller than the target at all."""
    found = _of_vocabulary(speculation, target, draft)
    sizes = [parameters(folder) for folder, _ in (target, draft)]
    if sizes[1] > sizes[0]:
        found.append(
            ("draft", f"{draft[0]} has {sizes[1]:,} parameters, the target {sizes[0]:,}: expected a draft that costs less")
        )
    return found


def _of_vocabulary(speculation: Speculation, target: Place, draft: Place) -> Problems:
    has_tokenizer = any((draft[0] / name).is_file() for name in _TOKENIZER)
    if speculation.universal:
        return [] if has_tokenizer else [("universal", f"{draft[0]} has no tokenizer to map tokens by; add tokenizer.json")]
    sizes = [config.get("vocab_size") for _, config in (target, draft)]
    remedy = "take a draft of the target's family, or say universal: true (it drafts the tokens that both have)"
    if sizes[0] != sizes[1]:
        return [("draft", f"{draft[0]} has a vocabulary of {sizes[1]}, expected the target's {sizes[0]}; {remedy}")]
    if not has_tokenizer:
        return []
    ours, theirs = (AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab() for folder, _ in (target, draft))
    differing = [token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token)]
    if differing:
        return [("draft", f"the tokenizer of {draft[0]} differs from the target's in {len(differing)} tokens; {remedy}")]
    return []


def _of_head(speculation: Speculation, target: Place, draft: Place) -> Problems:
    """A head on the target's hidden states: which layers it reads, and how wide they are."""
    found: Problems = []
    method, (folder, own), config = speculation.method, draft, target[1]
    width = own.get("target_hidden_size", own.get("hidden_size"))
    if width != config.get("hidden_size"):
        found.append(("draft", f"{folder} reads states of width {width}, expected the target's {config.get('hidden_size')}"))
    if method == "dflash":
        special = own.get("dflash_config") or {}
        if lacking := [key for key in ("mask_token_id", "target_layer_ids") if key not in special]:
            found.append(("draft", f"{folder}/config.json lacks dflash_config.{', dflash_config.'.join(lacking)}"))
        layers = special.get("target_layer_ids", [])
    else:
        layers = own.get("eagle_aux_hidden_state_layer_ids", [])
    if speculation.learns and not found and (unknown := unsupported(method, folder)):
        found.append(("tts.enabled", f"got true, but the trainable copy is none of {folder}: {unknown}"))
    if beyond := [layer for layer in layers if layer > config.get("num_hidden_layers", math.inf)]:
        found.append(("draft", f"{folder} reads layers {beyond}, expected at most {config['num_hidden_layers']}"))
    return found
