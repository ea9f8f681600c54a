"""What trainable copies of heads have in common: a head reads the target's hidden states, and may use its embeddings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.rollout.speculation.student import Followed

_ENDS = ("embed_tokens.weight", "lm_head.weight")
_MAPS = ("d2t", "t2d")
KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer: [T, KV heads, D] each."""


class HeadStudent:
    """The part of a ``Student`` that EAGLE-3 and DFlash share; tensors carry the names of the head's checkpoint.

    ``borrowed`` are those that the engine's draft takes from the target: they are read as they are, and never trained.
    """

    reads_features = True
    default_theta = 10_000.0

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        train: Literal["all", "body"],
        borrowed: Mapping[str, Tensor],
        vocabulary: int,
    ) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.device = device
        self.vocabulary = vocabulary
        stored = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
        offsets = stored.get("d2t")
        self.token_ids = None if offsets is None else (offsets + torch.arange(len(offsets))).to(device)
        self._borrowed = dict(borrowed)
        self._own = {
            name: nn.Parameter(tensor.float().to(device), requires_grad=train == "all" or name not in _ENDS)
            for name, tensor in stored.items()
            if name not in (*_MAPS, *borrowed)
        }
        config = self.config
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config.get("num_key_value_heads", self.heads)
        self.width: int = config.get("head_dim") or config["hidden_size"] // self.heads

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._own.values() if parameter.requires_grad]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self._own.items() if parameter.requires_grad)

    def prefix_bytes(self, length: int) -> int:
        """Keys and values of every layer, and the hidden states that wait to be read."""
        layers = self.config.get("num_hidden_layers", 1)
        return length * 4 * (2 * layers * self.kv_heads * self.width + self.weight("fc.weight").shape[1])

    def rows(self, requests: Sequence[Followed]) -> list[list[Tensor]]:
        return [self.rows_of(request) for request in requests]

    def rows_of(self, request: Followed) -> list[Tensor]:
        """Logits [K, V] of each of the request's lessons."""
        raise NotImplementedError

    # ---- parts of a decoder layer

    def weight(self, name: str) -> Tensor:
        return self._own[name] if name in self._own else self._borrowed[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weight(f"{name}.weight"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight(f"{name}.weight"), self.config["rms_norm_eps"])

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return F.embedding(torch.tensor(tokens, device=self.device), self.weight("embed_tokens.weight")).float()

    def states(self, request: Followed, first: int, end: int) -> Tensor:
        """``fc`` of the target's hidden states at the positions [first, end)."""
        assert request.features is not None
        return self.linear(request.features[first - request.features_from : end - request.features_from], "fc")

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions, halves against each other, of [N, heads, D]."""
        theta = self.config.get("rope_theta") or (self.config.get("rope_parameters") or {}).get(
            "rope_theta", self.default_theta
        )
        frequencies = theta ** (-torch.arange(0, self.width, 2, device=self.device).float() / self.width)
        angles = positions.float()[:, None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def spread(self, x: Tensor) -> Tensor:
        """KV heads repeated for the query heads that share them: […, KV heads, D] -> […, heads, D]."""
        return x.repeat_interleave(self.heads // self.kv_heads, dim=-2)

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """Of queries [N, heads, D] on keys [T, KV heads, D]: [N, heads, T]."""
        return torch.einsum("nhd,thd->nht", query, self.spread(keys)) / math.sqrt(self.width)

    def mix(self, weights: Tensor, values: Tensor) -> Tensor:
        """[N, heads, D]"""
        return torch.einsum("nht,thd->nhd", weights, self.spread(values))

    def finish(self, mixed: Tensor, residual_NH: Tensor, layer: str) -> Tensor:
        """From the heads' outputs [N, heads, D] to the layer's, with both residuals."""
        middle = residual_NH + self.linear(mixed.flatten(-2), f"{layer}self_attn.o_proj")
        x = self.norm(middle, f"{layer}post_attention_layernorm")
        gate, up = self.linear(x, f"{layer}mlp.gate_proj"), self.linear(x, f"{layer}mlp.up_proj")
        return middle + self.linear(F.silu(gate) * up, f"{layer}mlp.down_proj")
