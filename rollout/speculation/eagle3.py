"""The trainable copy of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), as vLLM's ``llama_eagle3`` computes it.

At position t the head reads the token at t + 1 and the target's hidden states at t, and predicts the token at t + 2.  Where the
target has not been yet, its own output stands in for the hidden states: that is how it drafts more than one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.rollout.speculation.heads import HeadStudent, KeyValue
from slipstream.rollout.speculation.student import Followed

UNSUPPORTED = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "rope_scaling")
"""Keys of a head's config that this copy does not know, where they are set."""
_LAYER = "midlayer."


class Eagle3Student(HeadStudent):
    """The ``Student`` of method eagle3, for heads of one layer."""

    def rows_of(self, request: Followed) -> list[Tensor]:
        """Positions up to the last lesson's are read with the target's states; from each lesson's on the head goes alone."""
        lessons, first = request.lessons, request.prefix.length
        starts = torch.tensor([lesson.start - 1 for lesson in lessons], device=self.device)
        read_TH, context = self._read(request, first, int(starts[-1]) + 1)
        hidden_MH = read_TH[starts - first]
        outputs, own = [hidden_MH], list[KeyValue]()
        for step in range(1, max(len(lesson.target_KV) for lesson in lessons)):
            tokens = [request.tokens[min(lesson.start + step, len(request.tokens) - 1)] for lesson in lessons]
            hidden_MH = self._step(tokens, hidden_MH, starts, step, context, own)
            outputs.append(hidden_MH)
        logits_KMV = [self.linear(self.norm(hidden_MH, "norm"), "lm_head") for hidden_MH in outputs]
        return [torch.stack([rows[m] for rows in logits_KMV[: len(lesson.target_KV)]]) for m, lesson in enumerate(lessons)]

    def _read(self, request: Followed, first: int, end: int) -> tuple[Tensor, KeyValue]:
        """Outputs [end − first, H] at the new positions, and the keys and values of all, which become the prefix."""
        positions = torch.arange(first, end, device=self.device)
        states_TH = self.states(request, first, end)
        query, key, value = self._project(request.tokens[first + 1 : end + 1], states_TH, positions)
        if request.prefix.layers:
            old_key, old_value = request.prefix.layers[0]
            key, value = torch.cat([old_key, key]), torch.cat([old_value, value])
        future = torch.arange(end, device=self.device) > positions[:, None]
        weights = self.scores(query, key).masked_fill(future[:, None], -math.inf).softmax(-1)
        request.prefix.layers = [(key.detach().clone(), value.detach().clone())]
        request.prefix.length = end
        return self.finish(self.mix(weights, value), states_TH, _LAYER), (key, value)

    def _step(
        self, tokens: Sequence[int], hidden_MH: Tensor, starts: Tensor, step: int, context: KeyValue, own: list[KeyValue]
    ) -> Tensor:
        """One step on from every lesson: it sees the context up to the lesson's position, and its own steps since then."""
        keys, values = context
        query, key, value = self._project(tokens, hidden_MH, starts + step)
        own.append((key, value))
        later = torch.arange(len(keys), device=self.device) > starts[:, None]
        seen = self.scores(query, keys).masked_fill(later[:, None], -math.inf)
        mine = torch.stack([(query * self.spread(k)).sum(-1) for k, _ in own], dim=-1) / math.sqrt(self.width)
        weights = torch.cat([seen, mine], dim=-1).softmax(-1)
        mixed = self.mix(weights[..., : len(keys)], values)
        for index, (_, v) in enumerate(own):
            mixed = mixed + weights[..., len(keys) + index, None] * self.spread(v)
        return self.finish(mixed, hidden_MH, _LAYER)

    def _project(self, tokens: Sequence[int], hidden_NH: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [N, heads, D], key and value [N, KV heads, D]."""
        embedded, hidden = (
            self.norm(self.embed(tokens), f"{_LAYER}input_layernorm"),
            self.norm(hidden_NH, f"{_LAYER}hidden_norm"),
        )
        x = torch.cat([embedded, hidden], -1)
        query, key, value = (
            self.linear(x, f"{_LAYER}self_attn.{part}_proj").unflatten(-1, (heads, self.width))
            for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        return self.rotate(query, positions), self.rotate(key, positions), value
