"""Whether a draft fits its target and this machine, before an engine starts: everything that is wrong, at once."""

from __future__ import annotations

import importlib.util
import json
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from slipstream.core.mistakes import UserError
from slipstream.core.section import Problems
from slipstream.core.speculation import LEARNING, Speculation
from slipstream.rollout.speculation.folders import Place, not_finite, parameters, shapes
from slipstream.rollout.speculation.following import capacity
from slipstream.rollout.speculation.head_checks import ARCHITECTURES, of_head, of_medusa
from slipstream.rollout.speculation.head_student import head_prefix_bytes, twin
from slipstream.rollout.speculation.student import prefix_bytes

_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_NEXT_TOKEN_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_predict")
_ARCTIC = "arctic-inference==0.1.1"
_WHOLE = ("model.safetensors", "model.safetensors.index.json")
_NO_TEXT = ("ForMaskedLM", "ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification")


def require_runnable(
    speculation: Speculation, target: Path, draft: Path | None, *, on_gpu: bool, max_length: int | None = None
) -> None:
    """Raise UserError with every reason why ``target`` cannot be served with these drafts on this machine.

    ``max_length`` bounds a request, prompt and response; without it the memory of Test-Time Speculation is not looked at.
    """
    found = [] if not speculation.on else problems(speculation, target, draft, on_gpu, max_length)
    if found:
        raise UserError("\n".join(f"rollout.speculation.{key}: {problem}" for key, problem in found))


def problems(
    speculation: Speculation, target: Path, draft: Path | None, on_gpu: bool, max_length: int | None = None
) -> Problems:
    """What is wrong, as (key, problem).  ``draft`` is the folder that ``speculation.draft`` means, where there is one."""
    found = _of_device(speculation, on_gpu)
    text = _config(target)
    if draft is None:
        if speculation.method == "mtp" and not any(text.get(key) for key in _NEXT_TOKEN_LAYERS):
            found.append(("method", f"got mtp, but {target} has no layers that predict further tokens; give a draft"))
        return found
    try:
        return found + _of_draft(speculation, (target, text), draft, max_length)
    except Exception as problem:  # noqa: BLE001  whatever a broken folder makes its readers raise
        return [*found, ("draft", f"{draft} cannot be read: {type(problem).__name__}: {problem}")]


def _of_draft(speculation: Speculation, target: Place, folder: Path, max_length: int | None) -> Problems:
    if lacking := _lacking(folder):
        return [("draft", f"{folder} {lacking}; expected a folder with config.json and *.safetensors")]
    draft, method = (folder, _config(folder)), speculation.method
    if method == "medusa":
        return of_medusa(target, folder)
    if method not in LEARNING:
        return []
    found = _of_numbers(folder) + (_of_model if method == "draft_model" else of_head)(speculation, target, draft)
    if speculation.learns and max_length is not None and not found:
        found = _of_memory(speculation, target, draft, max_length)
    return found


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
    plain: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return plain.get("text_config") or plain


def _of_model(speculation: Speculation, target: Place, draft: Place) -> Problems:
    """A whole model as draft: its vocabulary, its tensors, and whether it is smaller than the target at all."""
    folder, own = draft
    found = _of_vocabulary(speculation, target, draft)
    sizes = [parameters(place) for place in (target[0], folder)]
    if sizes[1] > sizes[0]:
        found.append(
            ("draft", f"{folder} has {sizes[1]:,} parameters, the target {sizes[0]:,}: expected a draft that costs less")
        )
    if silent := [name for name in own.get("architectures") or [] if not _writes(name)]:
        found.append(("draft", f"{folder} is a {', '.join(silent)}, which writes no text; expected a causal language model"))
    if speculation.learns and not any((folder / name).is_file() for name in _WHOLE):
        text = f"got true, and the trainable copy is read from {' or '.join(_WHOLE)}, which {folder} lacks"
        found.append(("tts.enabled", text))
    if not found and not own.get("quantization_config"):
        found = _of_tensors(folder)
    return found


def _writes(architecture: str) -> bool:
    head = architecture in chain(*ARCHITECTURES.values(), ("MedusaModel",))
    return not (head or architecture in MODEL_MAPPING_NAMES.values() or architecture.endswith(_NO_TEXT))


def _of_tensors(folder: Path) -> Problems:
    """Tensors against config.json, where transformers knows the model; others are left to vLLM."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, KeyError, ImportError):
        return []
    there = shapes(folder)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    differing = [name for name in sorted({*there} & {*expected}) if there[name] != expected[name]]
    return [
        ("draft", f"{folder} has {name} of shape {there[name]}, expected {expected[name]} by its config.json")
        for name in differing[:3]
    ]


def _of_memory(speculation: Speculation, target: Place, draft: Place, max_length: int) -> Problems:
    """Whether Test-Time Speculation can follow even one request."""
    if speculation.method == "draft_model":
        config = AutoConfig.from_pretrained(draft[0], local_files_only=True).get_text_config()
        vocabulary, of_prefix = config.vocab_size, prefix_bytes(config, max_length)
    else:
        vocabulary = target[1]["vocab_size"]
        of_prefix = head_prefix_bytes(twin(speculation.method, draft[1]), max_length)
    try:
        capacity(
            speculation.tts,
            vocabulary=vocabulary,
            prefix_bytes=of_prefix,
            tokens=speculation.tokens,
            max_length=max_length,
        )
    except ValueError as problem:
        return [("tts.max_memory_mib", str(problem).removeprefix("rollout.speculation.tts.max_memory_mib: "))]
    return []


def _of_numbers(folder: Path) -> Problems:
    if (broken := not_finite(folder)) is None:
        return []
    return [("draft", f"{folder} has NaN or infinity in {broken}, expected finite weights: it was saved broken")]


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
