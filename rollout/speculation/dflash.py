"""The trainable copy of a DFlash head, as vLLM's ``qwen3_dflash`` computes it.

It drafts K tokens in one pass: queries are the last token and K masks, which see one another and the target's hidden states at
all positions before, as keys and values of every layer.  The mask at a position predicts the token there, whatever was drafted
before it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.rollout.speculation.heads import HeadStudent, KeyValue
from slipstream.rollout.speculation.student import Followed

UNSUPPORTED = ("attention_bias", "rope_scaling", "is_causal", "layer_types", "sliding_window", "add_swa_attention_sink_bias")
UNSUPPORTED_INSIDE = ("causal", "use_swa", "attention_sink_bias", "attention_value_scale")
"""Keys of a head's config, and of its ``dflash_config``, that this copy does not know, where they are set."""


class DFlashStudent(HeadStudent):
    """The ``Student`` of method dflash.  ``drafted`` is K, which a pass needs to be told: all masks see one another."""

    default_theta = 1_000_000.0
    drafted: int

    def rows_of(self, request: Followed) -> list[Tensor]:
        lessons, first = request.lessons, request.prefix.length
        starts = torch.tensor([lesson.start - 1 for lesson in lessons], device=self.device)
        context = self._read(request, first, int(starts[-1]) + 1)
        mask = self.config["dflash_config"]["mask_token_id"]
        queries = 1 + self.drafted
        tokens = [token for lesson in lessons for token in (request.tokens[lesson.start], *([mask] * self.drafted))]
        positions = (starts[:, None] + 1 + torch.arange(queries, device=self.device)).flatten()
        hidden_NH = self.embed(tokens)
        for index, keys_values in enumerate(context):
            hidden_NH = self._layer(index, hidden_NH, positions, starts, keys_values)
        logits_MQV = self.linear(self.norm(hidden_NH, "norm"), "lm_head").unflatten(0, (len(lessons), queries))
        return [logits_QV[1 : 1 + len(lesson.target_KV)] for lesson, logits_QV in zip(lessons, logits_MQV, strict=True)]

    def _read(self, request: Followed, first: int, end: int) -> list[KeyValue]:
        """Keys and values of every layer at all positions before ``end``, which become the prefix."""
        positions = torch.arange(first, end, device=self.device)
        states_TH = self.norm(self.states(request, first, end), "hidden_norm")
        found = []
        for index in range(self.config["num_hidden_layers"]):
            key, value = self._key_value(index, states_TH, positions)
            if request.prefix.layers:
                old_key, old_value = request.prefix.layers[index]
                key, value = torch.cat([old_key, key]), torch.cat([old_value, value])
            found.append((key, value))
        request.prefix.layers = [(key.detach().clone(), value.detach().clone()) for key, value in found]
        request.prefix.length = end
        return found

    def _key_value(self, index: int, x: Tensor, positions: Tensor) -> KeyValue:
        attention = f"layers.{index}.self_attn."
        key, value = (self.linear(x, f"{attention}{part}_proj").unflatten(-1, (self.kv_heads, self.width)) for part in "kv")
        return self.rotate(self.norm(key, f"{attention}k_norm"), positions), value

    def _layer(self, index: int, hidden_NH: Tensor, positions: Tensor, starts: Tensor, context: KeyValue) -> Tensor:
        """Queries of M lessons, one block after the other; each sees the context up to its lesson, and its own block."""
        prefix = f"layers.{index}."
        x = self.norm(hidden_NH, f"{prefix}input_layernorm")
        query = self.linear(x, f"{prefix}self_attn.q_proj").unflatten(-1, (self.heads, self.width))
        query = self.rotate(self.norm(query, f"{prefix}self_attn.q_norm"), positions)
        key, value = self._key_value(index, x, positions)
        block = torch.arange(len(starts), device=self.device).repeat_interleave(1 + self.drafted)
        later = torch.arange(len(context[0]), device=self.device) > starts[block][:, None]
        hidden = torch.cat([later, block != block[:, None]], dim=1)
        keys, values = torch.cat([context[0], key]), torch.cat([context[1], value])
        weights = self.scores(query, keys).masked_fill(hidden[:, None], -math.inf).softmax(-1)
        return self.finish(self.mix(weights, values), hidden_NH, prefix)
