"""Trainable copies of drafts: what they have in common, and that of a whole model as draft."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from slipstream.rollout.speculation.placement import sent


@dataclass(slots=True)
class Lesson:
    """What one round taught about one request: rows k = 1.. whose draft prefix was accepted, the first rejected one included.

    Row k, over the draft's vocabulary, predicts the token at position ``start`` + k from those before it; logits are divided
    by the temperature.
    """

    start: int
    temperature: float
    target_KV: Tensor
    proposed_KV: Tensor | None


@dataclass(slots=True)
class Prefix:
    """Keys and values that the draft has computed for the first ``length`` tokens of one request, per layer.

    ``[N, length, D]`` of a whole model, ``[length, N, D]`` of a head (as in ``Past``): N key-value heads of D.
    They stay as the weights of their time made them, in the engine as here.
    """

    length: int = 0
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(slots=True)
class Followed:
    """A request whose rounds are learnt from: its committed tokens, what the draft knows of it, what is not yet learnt.

    ``features`` are the target's hidden states [n, F] at the positions from ``features_from`` on, for students that read them.
    """

    prefix: Prefix = field(default_factory=Prefix)
    lessons: list[Lesson] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    features: Tensor | None = None
    features_from: int = 0

    def append(self, start: int, features: Tensor) -> bool:
        """Take hidden states at the positions from ``start`` on; those of rejected drafts give way.  False leaves a gap."""
        if self.features is None:
            self.features, self.features_from = features, start
            return start == 0
        keep = start - self.features_from
        if keep < 0 or keep > len(self.features):
            return False
        self.features = torch.cat([self.features[:keep], features])
        return True

    def trim(self) -> None:
        """Forget the hidden states that the prefix has taken in."""
        if self.features is not None:
            past = self.prefix.length - self.features_from
            self.features, self.features_from = self.features[past:].clone(), self.prefix.length


class Student(Protocol):
    """A float32 copy of the engine's draft that can be trained; publishing makes the two equal."""

    vocabulary: int
    """Size of the target's."""
    token_ids: Tensor | None
    """The target's tokens that the draft can propose, in the draft's order; None for all."""
    reads_features: bool
    """Whether it needs the target's hidden states of every position, from a request's first token on."""

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The same under the names of the draft's checkpoint; fused ones of the engine need all their parts."""
        ...

    def prefix_bytes(self, length: int) -> int:
        """Memory of what is kept of one request of so many tokens."""
        ...

    def rows(self, requests: Sequence[Followed]) -> list[list[Tensor]]:
        """Logits [K, V] of every lesson of every request, which has some; prefixes move on to their ends."""
        ...


def prefix_bytes(config: Any, length: int) -> int:
    """Memory of the keys and values that a model of that configuration keeps of ``length`` tokens, in float32."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return length * config.num_hidden_layers * 2 * heads * width * 4


class DraftModelStudent:
    """The ``Student`` of method draft_model, by transformers.  Gradients flow through the tokens of one call; prefixes are
    constants."""

    token_ids = None
    reads_features = False

    def __init__(
        self, folder: Path, device: torch.device, *, train: Literal["all", "body"], frozen: Collection[str] = ()
    ) -> None:
        """``frozen`` names parameters that the engine shares with the target: they are never trained nor published."""
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.model.to(device).eval()  # no dropout: a draft has one distribution
        self.vocabulary = self.model.config.get_text_config().vocab_size
        self._device = device
        ends: set[int] = set()
        if train == "body":
            ends = {
                id(p)
                for end in (self.model.get_input_embeddings(), self.model.get_output_embeddings())
                for p in end.parameters()
            }
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(id(parameter) not in ends and name not in frozen)

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p.detach()) for name, p in self.model.named_parameters() if p.requires_grad)

    def prefix_bytes(self, length: int) -> int:
        return prefix_bytes(self.model.config.get_text_config(), length)

    def rows(self, requests: Sequence[Followed]) -> list[list[Tensor]]:
        new: list[list[int]] = []
        for request in requests:
            first, last = request.lessons[0].start, request.lessons[-1]
            self.extend(request.prefix, request.tokens[request.prefix.length : first])
            new.append(request.tokens[request.prefix.length : last.start + len(last.target_KV)])
        starts = [request.prefix.length for request in requests]
        logits = self.logits([request.prefix for request in requests], new)
        return [
            [logits_TV[lesson.start - start :][: len(lesson.target_KV)] for lesson in request.lessons]
            for request, start, logits_TV in zip(requests, starts, logits, strict=True)
        ]

    @torch.no_grad()
    def extend(self, prefix: Prefix, tokens: Sequence[int]) -> None:
        """Read tokens that nothing is to be learnt from."""
        if tokens:
            self._forward([prefix], [tokens], logits_to_keep=1)

    def logits(self, prefixes: Sequence[Prefix], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Next-token logits [tokens, V] after each of the new tokens of each request, which then are part of its prefix."""
        found = self._forward(prefixes, tokens, logits_to_keep=0)
        return [found[row, : len(new)] for row, new in enumerate(tokens)]

    def _forward(self, prefixes: Sequence[Prefix], tokens: Sequence[Sequence[int]], logits_to_keep: int) -> Tensor:
        """One batch: prefixes are padded on the left, new tokens on the right, where causality hides the padding."""
        past, new = max(prefix.length for prefix in prefixes), max(map(len, tokens))
        cache = self._cache(prefixes, past)
        output = self.model(
            input_ids=sent([[*row, *[0] * (new - len(row))] for row in tokens], self._device),
            attention_mask=sent([[0] * (past - p.length) + [1] * (p.length + new) for p in prefixes], self._device),
            position_ids=sent([[*range(p.length, p.length + new)] for p in prefixes], self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        for row, (prefix, row_ids) in enumerate(zip(prefixes, tokens, strict=True)):
            start = past - prefix.length
            prefix.layers = [
                (layer.keys[row, :, start : past + len(row_ids)].detach().clone(),
                 layer.values[row, :, start : past + len(row_ids)].detach().clone())
                for layer in cache.layers
            ]  # fmt: skip
            prefix.length += len(row_ids)
        return output.logits

    def _cache(self, prefixes: Sequence[Prefix], past: int) -> DynamicCache:
        cache = DynamicCache()
        if past:
            depth = max(len(p.layers) for p in prefixes)
            for index in range(depth):
                shape = next(p.layers[index][0].shape for p in prefixes if p.layers)
                empty = (torch.zeros(shape[0], 0, shape[2], device=self._device),) * 2
                pairs = [p.layers[index] if p.layers else empty for p in prefixes]
                padded = [
                    torch.stack([nn.functional.pad(pair[part], (0, 0, past - pair[part].shape[1], 0)) for pair in pairs])
                    for part in (0, 1)
                ]
                cache.update(padded[0], padded[1], index)
        return cache
