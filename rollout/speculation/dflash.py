"""A differentiable DFlash head, the twin of the one that vLLM runs: all draft tokens at once, in the places of masks.

Chen, Zhang 2026, "DFlash: Block Diffusion for Flash Speculative Decoding".  Parameters have the names of the checkpoints that
vLLM loads (``fc``, ``hidden_norm``, ``layers``, ``norm``).  Embedding and output head are the target's, never trained.
Shapes are those of ``context``; Q = K + 1 queries per anchor.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from jaxtyping import Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from slipstream.rollout.speculation.context import Context, Past, Unrolled, embedded, scored, visible, with_past

ARCHITECTURE = "DFlashDraftModel"
UNSUPPORTED = {"attention_bias": False, "logit_scale": 1.0, "is_causal": None, "is_neox_style": True}
UNSUPPORTED_DFLASH = {"causal": None, "use_swa": False, "attention_sink_bias": False, "attention_value_scale": None}
"""Variants of the head that the twin does not have, and the only value of each that it takes."""


class DFlashHead(nn.Module):
    """Layers over [the token after the anchor, K masks], which see each other and keys and values made of target features.

    Raises ValueError for a head of a variant that it would not reproduce.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        if problems := _problems(config):
            raise ValueError(f"DFlash head: {'; '.join(problems)}")
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.layer_ids: tuple[int, ...] = tuple(config.dflash_config["target_layer_ids"])
        self.mask_id: int = config.dflash_config["mask_token_id"]
        self.fc = nn.Linear(getattr(config, "target_hidden_size", hidden) * len(self.layer_ids), hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps)
        self.layers = nn.ModuleList([_Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(hidden, eps)
        self.rotary = Qwen3RotaryEmbedding(config)

    def forward(
        self, context: Context, embedding: Tensor, output_head: Tensor, anchors_A: Int[Tensor, " A"], tokens: int
    ) -> Unrolled:
        """Logits of ``tokens`` draft tokens after each anchor (an index into the context) and the token that follows it.

        ``embedding`` and ``output_head`` are the target's, ``[its vocabulary, H]``.
        """
        states_SH = self.hidden_norm(self.fc(context.features_SF))
        context_rotation = self.rotary(states_SH, context.positions_S[None])
        seen_AM = visible(context)[anchors_A]
        positions_AQ = context.positions_S[anchors_A][:, None] + 1 + torch.arange(tokens + 1, device=anchors_A.device)
        masks = torch.full((len(anchors_A), tokens), self.mask_id, device=anchors_A.device)
        hidden_AQH = embedded(torch.cat([context.next_ids_S[anchors_A][:, None], masks], dim=1), embedding)
        rotation = self.rotary(hidden_AQH, positions_AQ)
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            own = layer.keys_values(states_SH[None], context_rotation)
            keys.append(own[0][0])
            values.append(own[1][0])
            hidden_AQH = layer(hidden_AQH, rotation, with_past((keys[-1], values[-1]), context, i), seen_AM)
        logits_AKV = scored(self.norm(hidden_AQH[:, 1:]), output_head)
        past = Past(tuple(k.detach() for k in keys), tuple(v.detach() for v in values), context.sequence_S)
        return Unrolled(logits_KAV=logits_AKV.transpose(0, 1), past=past)

    @classmethod
    def load(cls, folder: Path) -> DFlashHead:
        """The head of a checkpoint, in float32.  Raises ValueError, naming the folder, where its tensors do not fit."""
        head = cls(Qwen3Config(**json.loads((folder / "config.json").read_text())))
        try:
            head.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
        except RuntimeError as error:
            raise ValueError(f"{folder}: not a DFlash head that can be trained: {error}") from error
        return head

    def save(self, folder: Path) -> None:
        """A checkpoint that vLLM loads."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        self.config.architectures = [ARCHITECTURE]
        (folder / "config.json").write_text(self.config.to_json_string(use_diff=False))


class _Layer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        hidden, eps, head_dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        queries, shared = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        self.head_dim, self.groups = head_dim, config.num_attention_heads // config.num_key_value_heads
        self.input_layernorm = Qwen3RMSNorm(hidden, eps)
        self.post_attention_layernorm = Qwen3RMSNorm(hidden, eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(hidden, queries, bias=False),
                "k_proj": nn.Linear(hidden, shared, bias=False),
                "v_proj": nn.Linear(hidden, shared, bias=False),
                "o_proj": nn.Linear(queries, hidden, bias=False),
                "q_norm": Qwen3RMSNorm(head_dim, eps),
                "k_norm": Qwen3RMSNorm(head_dim, eps),
            }
        )
        self.mlp = Qwen3MLP(config)

    def keys_values(self, states_ALH: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """``[A, L, N, D]`` each, of states that are normed already."""
        k, v = (self.self_attn[f"{name}_proj"](states_ALH).unflatten(-1, (-1, self.head_dim)) for name in "kv")
        k = self.self_attn["k_norm"](k)
        return apply_rotary_pos_emb(k, k, *rotation, unsqueeze_dim=2)[1], v

    def forward(
        self, hidden_AQH: Tensor, rotation: tuple[Tensor, Tensor], known: tuple[Tensor, Tensor], seen_AM: Tensor
    ) -> Tensor:
        normed = self.input_layernorm(hidden_AQH)
        q = self.self_attn["q_norm"](self.self_attn["q_proj"](normed).unflatten(-1, (-1, self.head_dim)))
        q = apply_rotary_pos_emb(q, q, *rotation, unsqueeze_dim=2)[0].unflatten(2, (-1, self.groups))  # [A, Q, N, groups, D]
        k, v = self.keys_values(normed, rotation)
        outside = torch.einsum("aqngd,mnd->aqngm", q, known[0]).masked_fill(~seen_AM[:, None, None, None], -torch.inf)
        inside = torch.einsum("aqngd,arnd->aqngr", q, k)
        weights = torch.cat([outside, inside], dim=-1).mul(self.head_dim**-0.5).softmax(dim=-1)
        m = known[0].shape[0]
        mixed = torch.einsum("aqngm,mnd->aqngd", weights[..., :m], known[1])
        mixed = mixed + torch.einsum("aqngr,arnd->aqngd", weights[..., m:], v)
        hidden_AQH = hidden_AQH + self.self_attn["o_proj"](mixed.flatten(2))
        return hidden_AQH + self.mlp(self.post_attention_layernorm(hidden_AQH))


def _problems(config: Qwen3Config) -> list[str]:
    special = getattr(config, "dflash_config", None) or {}
    found = [f"config.json lacks dflash_config.{key}" for key in ("target_layer_ids", "mask_token_id") if key not in special]
    got = {key: getattr(config, key, only) for key, only in UNSUPPORTED.items()}
    found += [f"{key}: got {got[key]}, expected {only}" for key, only in UNSUPPORTED.items() if got[key] != only]
    for key, only in UNSUPPORTED_DFLASH.items():
        if special.get(key, only) != only:
            found.append(f"dflash_config.{key}: got {special[key]}, expected {only}")
    if getattr(config, "draft_vocab_size", config.vocab_size) != config.vocab_size:
        found.append(f"draft_vocab_size: got {config.draft_vocab_size}, expected the target's {config.vocab_size}")
    return found
