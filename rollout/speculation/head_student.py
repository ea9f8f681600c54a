"""Heads on the target's hidden states as ``Student`` of TTS: the twins of ``eagle3`` and ``dflash``, one request at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

from slipstream.rollout.speculation.context import Context, Past, Unrolled
from slipstream.rollout.speculation.dflash import DFlashHead
from slipstream.rollout.speculation.eagle3 import Eagle3Head
from slipstream.rollout.speculation.placement import sent
from slipstream.rollout.speculation.student import Followed, prefix_bytes

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
"""What a head may borrow from the target, under the names of its checkpoint."""


class HeadStudent:
    """The ``Student`` of methods eagle3 and dflash.

    ``borrowed`` are the tensors that the engine's head takes from the target: they are read as they are, and never trained.
    ``tokens`` is K.  Raises ValueError for a head of a variant that the twins do not have.
    """

    reads_features = True

    def __init__(
        self,
        method: Literal["eagle3", "dflash"],
        folder: Path,
        device: torch.device,
        *,
        train: Literal["all", "body"],
        borrowed: Mapping[str, Tensor],
        vocabulary: int,
        tokens: int,
    ) -> None:
        needed = [EMBEDDING] if method == "eagle3" else [EMBEDDING, OUTPUT]
        if missing := [name for name in needed if name not in borrowed]:
            raise ValueError(
                f"rollout.speculation.tts: {folder} has its own {', '.join(missing)}, and the trainable copy of a {method} "
                "head knows only the target's; remove them from the checkpoint where they are the same"
            )
        self.vocabulary, self._tokens, self._device = vocabulary, tokens, device
        self._embedding = borrowed[EMBEDDING]
        self._output = borrowed.get(OUTPUT)
        self.head: Eagle3Head | DFlashHead = (Eagle3Head if method == "eagle3" else DFlashHead).load(folder).to(device)
        self.token_ids: Tensor | None = None
        if isinstance(self.head, Eagle3Head):
            if len(self.head.d2t) != vocabulary:
                self.token_ids = self.head.target_ids_V
            if self._output is not None:
                self.head.lm_head.weight = nn.Parameter(self._output, requires_grad=False)
            elif train == "body":
                self.head.lm_head.requires_grad_(False)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.head.parameters() if parameter.requires_grad]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p.detach()) for name, p in self.head.named_parameters() if p.requires_grad)

    def prefix_bytes(self, length: int) -> int:
        return head_prefix_bytes(self.head, length)

    def rows(self, requests: Sequence[Followed]) -> list[list[Tensor]]:
        return [self._rows(request) for request in requests]

    def _rows(self, request: Followed) -> list[Tensor]:
        """A lesson's anchor is the position before its last committed token: the last whose hidden states the head had."""
        lessons, first = request.lessons, request.prefix.length
        anchors_A = sent([lesson.start - 1 - first for lesson in lessons], self._device)
        context = self._context(request, first, lessons[-1].start)
        if isinstance(self.head, Eagle3Head):
            steps = max(len(lesson.target_KV) for lesson in lessons) - 1
            drafts = [[_at(request.tokens, lesson.start + 1 + j) for j in range(steps)] for lesson in lessons]
            drafts_AJ = sent(drafts, self._device).view(len(lessons), steps)
            unrolled = self.head(context, self._embedding, anchors_A, drafts_AJ)
        else:
            unrolled = self.head(context, self._embedding, self._output, anchors_A, self._tokens)
        self._keep(request, unrolled, lessons[-1].start)
        return [unrolled.logits_KAV[: len(lesson.target_KV), a] for a, lesson in enumerate(lessons)]

    def _context(self, request: Followed, first: int, end: int) -> Context:
        assert request.features is not None
        prefix, past = request.prefix, None
        if prefix.layers:
            none = torch.zeros(prefix.length, dtype=torch.long, device=self._device)
            past = Past(tuple(k for k, _ in prefix.layers), tuple(v for _, v in prefix.layers), none)
        next_ids_S = sent(request.tokens[first + 1 : end + 1], self._device)
        features_SF = request.features[first - request.features_from : end - request.features_from]
        return Context.of_one(next_ids_S, features_SF, first, past)

    def _keep(self, request: Followed, unrolled: Unrolled, end: int) -> None:
        """The new positions' keys and values become part of the prefix."""
        own = list(zip(unrolled.past.keys, unrolled.past.values, strict=True))
        known = request.prefix.layers
        request.prefix.layers = [
            (torch.cat([known[i][0], key]), torch.cat([known[i][1], value])) if known else (key, value)
            for i, (key, value) in enumerate(own)
        ]
        request.prefix.length = end


def _at(tokens: Sequence[int], index: int) -> int:
    """A token, or anything beyond the end: the rows there are not asked for."""
    return tokens[index] if index < len(tokens) else 0


def head_prefix_bytes(head: Eagle3Head | DFlashHead, length: int) -> int:
    """Keys and values of every layer, and the hidden states that wait to be read."""
    return prefix_bytes(head.config, length) + length * 4 * head.fc.in_features


def twin(method: str, config: dict[str, Any]) -> Eagle3Head | DFlashHead:
    """The head of a config.json, without its weights.  Raises ValueError for a variant that the twins do not have."""
    with torch.device("meta"):
        return Eagle3Head(LlamaConfig(**config)) if method == "eagle3" else DFlashHead(Qwen3Config(**config))


def unsupported(method: str, config: dict[str, Any]) -> str | None:
    """Why the twin cannot be that head, or None."""
    try:
        twin(method, config)
    except ValueError as problem:
        return str(problem)
    return None
