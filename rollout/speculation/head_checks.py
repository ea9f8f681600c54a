"""Whether a head on the target's hidden states is one that vLLM loads for this target, by its config.json and its tensors."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from slipstream.core.section import Problems
from slipstream.core.speculation import Speculation
from slipstream.rollout.speculation.eagle3 import default_layer_ids
from slipstream.rollout.speculation.folders import Place, Shapes, parameters, shapes, tensor_of
from slipstream.rollout.speculation.head_student import twin, unsupported

ARCHITECTURES = {
    "eagle3": (
        "Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3ForCausalLM", "Eagle3Qwen3vlForCausalLM", "LlamaForCausalLMEagle3",
        "PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM",
    ),
    "dflash": (
        "DFlash2DraftModel", "DFlashDraftModel", "DFlashLagunaForCausalLM", "DFlashMuseGlimmerAssistantModel",
        "LiLiCorrDraftModel", "MuseGlimmerAssistantModel",
    ),
}  # fmt: skip
"""The heads of vLLM's registry; it looks a name up with the method before it, too (LlamaForCausalLM of an EAGLE-3 head)."""
_PREFIX = {"eagle3": "Eagle3", "dflash": "DFlash"}
_TWINS = {
    "eagle3": ("Eagle3LlamaForCausalLM", "LlamaForCausalLM", "LlamaForCausalLMEagle3"),
    "dflash": ("DFlashDraftModel",),
}
"""Architectures whose tensors are the twin's."""
_OTHER_NAMES = {
    "eagle3": (("layers.0.", "midlayer."),),
    "dflash": (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm.")),
}
"""What vLLM renames when it loads, to the twin's names."""
_OWN_OR_THE_TARGETS = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
_IDS = "eagle_aux_hidden_state_layer_ids"


def of_head(speculation: Speculation, target: Place, draft: Place) -> Problems:
    """Everything that stands against a head of eagle3 or dflash."""
    method, (folder, own) = speculation.method, draft
    if "speculators_model_type" in own and not speculation.learns:
        return []  # vLLM's speculators format, which only vLLM translates
    found: Problems = []
    if architectures := own.get("architectures"):
        looked_up = {*architectures, *(_PREFIX[method] + name for name in architectures)}
        if not looked_up & {*ARCHITECTURES[method]}:
            known = ", ".join(ARCHITECTURES[method])
            found.append(("draft", f"{folder} is a {', '.join(architectures)}, expected a head of {method}: one of {known}"))
    width = own.get("target_hidden_size") or own.get("hidden_size")
    if width != target[1].get("hidden_size"):
        found.append(("draft", f"{folder} reads states of width {width}, expected the target's {target[1].get('hidden_size')}"))
    got, vocabulary = own.get("vocab_size"), target[1].get("vocab_size")
    if vocabulary is not None and got != vocabulary:
        found.append(("draft", f"{folder} has a vocabulary (vocab_size) of {got}, expected the target's {vocabulary}"))
    found += [("draft", f"{folder} {text}") for text in (_eagle3 if method == "eagle3" else _dflash)(own, target[1])]
    if speculation.learns:
        found += _of_twin(method, draft, found)
    found += [("draft", f"{folder} {text}") for text in _of_tensors(draft, speculation, fitting=not found)]
    return found + _of_size(target[0], folder)


def of_medusa(target: Place, folder: Path) -> Problems:
    """vLLM leaves out the tensors whose names are no Medusa head's, so what is there decides."""
    width = target[1].get("hidden_size")
    blocks = [s for name, s in shapes(folder).items() if name.removeprefix("medusa_heads.").startswith(("blocks.", "0.0."))]
    if not blocks:
        return [("draft", f"{folder} has no tensor of a Medusa head (blocks.0.layers.0.weight, or 0.0.linear.weight)")]
    if wrong := [shape for shape in blocks if len(shape) == 2 and shape != (width, width)]:
        return [
            ("draft", f"{folder} has heads of shape {wrong[0]}, expected {(width, width)}: the width of the target's states")
        ]
    return []


def _eagle3(own: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """vLLM reads the inputs of layers 0, 1, … and, one further, the output of the last; without ids the layers of EAGLE-3."""
    special = own.get("eagle_config") or {}
    if special.get("use_aux_hidden_state") is False:
        return []
    layers = target.get("num_hidden_layers", sys.maxsize)
    ids = own.get(_IDS) or special.get(_IDS)
    if ids is None or ids == []:
        ids = [*default_layer_ids(layers)]
        if ids != sorted({*ids} & {*range(layers)}):
            return [f"lacks {_IDS}, and vLLM's default {ids} are not three different ones of the target's {layers} layers"]
    expected = own.get("num_aux_hidden_states") or len(special.get(_IDS) or ()) or 3
    return _of_layers(ids, _IDS, range(layers + 1), expected)


def _dflash(own: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """vLLM adds 1 to a layer's id, since its own count inputs."""
    special = own.get("dflash_config") or {}
    if not isinstance(special, dict):
        return [f"has a dflash_config that is {special!r}, expected a mapping"]
    if lacking := [key for key in ("mask_token_id", "target_layer_ids") if key not in special]:
        return [f"lacks dflash_config.{', dflash_config.'.join(lacking)} in config.json"]
    layers = target.get("num_hidden_layers", sys.maxsize)
    found = _of_layers(special["target_layer_ids"], "dflash_config.target_layer_ids", range(-1, layers))
    mask, vocabulary = special["mask_token_id"], target.get("vocab_size")
    if not isinstance(mask, int) or not 0 <= mask < (vocabulary or math.inf):
        found.append(f"has dflash_config.mask_token_id {mask!r}, expected a token of the target's {vocabulary}")
    return found


def _of_layers(ids: Any, key: str, readable: range, expected: int | None = None) -> list[str]:
    if not isinstance(ids, list) or not ids or not all(type(layer) is int for layer in ids):
        return [f"has {key} {ids!r}, expected a list of layer numbers"]
    found = []
    if beyond := [layer for layer in ids if layer not in readable]:
        found.append(f"reads layers {beyond}, expected at most {readable[-1]} and at least {readable[0]}")
    if len({*ids}) != (expected or len(ids)):
        found.append(f"has {key} {ids}, expected {expected or len(ids)} different ones")
    return found


def _of_twin(method: str, draft: Place, found: Problems) -> Problems:
    """What only a head that learns has to be."""
    folder, own = draft
    if not (folder / "model.safetensors").is_file():
        return [("tts.enabled", f"got true, and the trainable copy is read from model.safetensors, which {folder} lacks")]
    if not found and (unknown := unsupported(method, own)):
        return [("tts.enabled", f"got true, but the trainable copy is none of {folder}: {unknown}")]
    return []


def _of_tensors(draft: Place, speculation: Speculation, *, fitting: bool) -> list[str]:
    """Tensors against config.json, and the draft vocabulary's tokens against the target's.

    The twin's tensors are those of vLLM's head, but for variants that it does not have; a head may leave out what it takes from
    the target, unless it learns, and have more.
    """
    (folder, own), method = draft, speculation.method
    there, found = shapes(folder), []
    if "d2t" in there and own.get("vocab_size") is not None:
        mapped = tensor_of(folder, "d2t").long()
        targets = mapped + torch.arange(len(mapped))
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < own["vocab_size"]:
            span = f"{int(targets.min())} to {int(targets.max())}"
            found.append(f"maps its tokens (d2t) to {span}, expected tokens of the target's {own['vocab_size']}")
    if not fitting or not (speculation.learns or _is_plain(method, own, there)):
        return found
    twin: Shapes = {}
    with suppress(ValueError):  # a variant that the twin does not have
        twin = _shapes_of_twin(method, own)
    if not twin:
        return found
    if speculation.learns:
        needed = {*twin} - {"d2t"}
        ignored = {"t2d", "embed_tokens.weight"} if method == "eagle3" else set()
        if more := sorted({*there} - {*twin} - ignored):
            found.append(f"has tensors that its trainable copy does not know: {', '.join(more[:3])}")
    else:
        there = {_twins_name(method, name): shape for name, shape in there.items()}
        needed = {*twin} - {*_OWN_OR_THE_TARGETS}
    if lacking := sorted(needed - {*there}):
        found.append(f"lacks {', '.join(lacking[:3])}{' …' if len(lacking) > 3 else ''}, which a head of {method} has")
    for name in [name for name in sorted({*twin} & {*there}) if twin[name] != there[name]][:3]:
        found.append(f"has {name} of shape {there[name]}, expected {twin[name]} by its config.json")
    return found


def _is_plain(method: str, own: dict[str, Any], there: Shapes) -> bool:
    """Whether vLLM's head has the twin's tensors, each under its own name and in plain numbers."""
    quantised = own.get("quantization_config") or own.get("compression_config")
    special = own.get("eagle_config") or {}
    fused = any("qkv_proj" in name or "gate_up_proj" in name for name in there)
    known = all(name in _TWINS[method] for name in own.get("architectures") or _TWINS[method])
    return known and not quantised and not fused and not {"use_aux_hidden_state", "norm_before_fc"} & {*special}


def _shapes_of_twin(method: str, own: dict[str, Any]) -> Shapes:
    ids = own.get(_IDS) or (own.get("eagle_config") or {}).get(_IDS) or [0, 1, 2]  # as many as vLLM reads without any
    head = twin(method, own if method == "dflash" else {**own, _IDS: ids})
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}


def _twins_name(method: str, name: str) -> str:
    for theirs, ours in _OTHER_NAMES[method]:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _of_size(target: Path, folder: Path) -> Problems:
    """An embedding of its own costs a head nothing to speak of."""
    own = sum(math.prod(shape) for name, shape in shapes(folder).items() if name != "embed_tokens.weight")
    if own > (theirs := parameters(target)):
        return [("draft", f"{folder} has {own:,} parameters, the target {theirs:,}: expected a draft that costs less")]
    return []
