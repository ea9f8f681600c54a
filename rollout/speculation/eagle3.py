"""A differentiable EAGLE-3 head, the twin of the one that vLLM runs.

Li et al. 2025, "EAGLE-3", arXiv 2503.01840.  Parameters have the names of the checkpoints that vLLM loads (``fc``,
``midlayer``, ``norm``, ``lm_head``, ``d2t``), so a state dict goes either way.  The embedding is the target's, never trained.

Shapes are those of ``context``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from slipstream.rollout.speculation.context import Context, Past, Unrolled, embedded, scored, visible, with_past

ARCHITECTURE = "LlamaForCausalLMEagle3"
UNSUPPORTED = {"norm_before_fc": False, "fc_norm": False, "attention_bias": False, "logit_scale": 1.0}
"""Variants of the head that the twin does not have, and the only value of each that it takes."""


def default_layer_ids(layers: int) -> tuple[int, int, int]:
    """The layers that vLLM's head reads of a target of so many, where its checkpoint names none: the *inputs* of each."""
    return 2, layers // 2, layers - 3


class Eagle3Head(nn.Module):
    """One Llama layer over [embedding of the next token; features of this one], unrolled over its own outputs.

    Raises ValueError for a head of a variant that it would not reproduce.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        if getattr(config, "draft_vocab_size", None) is None:  # it drafts all of the target's tokens
            config.draft_vocab_size = config.vocab_size
        if problems := _problems(config):
            raise ValueError(f"EAGLE-3 head: {'; '.join(problems)}")
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.layer_ids: tuple[int, ...] = tuple(config.eagle_aux_hidden_state_layer_ids)
        target_hidden = getattr(config, "target_hidden_size", hidden)
        self.fc = nn.Linear(target_hidden * len(self.layer_ids), hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.d2t: Tensor

    @property
    def target_ids_V(self) -> Int[Tensor, " V"]:
        """The target's id of each token of the draft vocabulary."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def forward(
        self, context: Context, embedding: Tensor, anchors_A: Int[Tensor, " A"], drafts_AJ: Int[Tensor, "A J"]
    ) -> Unrolled:
        """Logits of K = J + 1 draft tokens after each anchor (an index into the context), where the drafts were ``drafts_AJ``.

        ``embedding`` is the target's, ``[its vocabulary, H]``.  The first step sees the target's features; each later one sees
        the output of the step before it in their place, at the next position, and the keys and values of those steps.
        """
        features_SH = self.fc(context.features_SF)
        rotation = self.rotary(features_SH, context.positions_S[None])
        query, own = self.midlayer.project(embedded(context.next_ids_S, embedding), features_SH, rotation)
        known = with_past(own, context, layer=0)
        hidden_SH = self.midlayer.rest(query, known, visible(context), features_SH)
        outputs = [self.norm(hidden_SH[anchors_A])]
        hidden_AH = self._carried(hidden_SH[anchors_A], outputs[0])
        up_to_anchor = visible(context)[anchors_A]
        steps: list[tuple[Tensor, Tensor]] = []
        for j in range(drafts_AJ.shape[1]):
            rotation = self.rotary(hidden_AH, context.positions_S[anchors_A][None] + j + 1)
            embeds_AH = embedded(drafts_AJ[:, j], embedding)
            query, mine = self.midlayer.project(embeds_AH, hidden_AH, rotation)
            steps.append(mine)
            hidden_AH = self.midlayer.rest(query, known, up_to_anchor, hidden_AH, steps)
            outputs.append(self.norm(hidden_AH))
            hidden_AH = self._carried(hidden_AH, outputs[-1])
        return Unrolled(
            logits_KAV=scored(torch.stack(outputs), self.lm_head.weight),
            past=Past((own[0].detach(),), (own[1].detach(),), context.sequence_S),
        )

    def _carried(self, hidden: Tensor, normed: Tensor) -> Tensor:
        """What the next step takes for its features."""
        return normed if getattr(self.config, "norm_output", False) else hidden

    # ---- checkpoints

    @classmethod
    def load(cls, folder: Path) -> Eagle3Head:
        """The head of a checkpoint, in float32.  Raises ValueError, naming the folder, where its tensors do not fit."""
        head = cls(LlamaConfig(**json.loads((folder / "config.json").read_text())))
        tensors = {
            name: t for name, t in load_file(folder / "model.safetensors").items() if name not in ("t2d", "embed_tokens.weight")
        }
        if "d2t" not in tensors:
            tensors["d2t"] = head.d2t
        try:
            head.load_state_dict({name: t if name == "d2t" else t.float() for name, t in tensors.items()})
        except RuntimeError as error:
            raise ValueError(f"{folder}: not an EAGLE-3 head that can be trained: {error}") from error
        return head

    def save(self, folder: Path) -> None:
        """A checkpoint that vLLM loads."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        self.config.architectures = [ARCHITECTURE]
        (folder / "config.json").write_text(self.config.to_json_string(use_diff=False))


class _Layer(nn.Module):
    """The decoder layer: its attention looks at known positions by a mask, and at the steps of its own anchor one by one."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.head_dim = config.head_dim or hidden // config.num_attention_heads
        self.norm_before_residual = getattr(config, "norm_before_residual", False)
        self.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.input_layernorm = LlamaRMSNorm(hidden, eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * hidden, config.num_attention_heads * self.head_dim, bias=False),
                "k_proj": nn.Linear(2 * hidden, config.num_key_value_heads * self.head_dim, bias=False),
                "v_proj": nn.Linear(2 * hidden, config.num_key_value_heads * self.head_dim, bias=False),
                "o_proj": nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=False),
            }
        )
        self.mlp = LlamaMLP(config)

    def project(
        self, embeds_LH: Tensor, hidden_LH: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Queries ``[L, heads, D]`` and (keys, values) ``[L, KV heads, D]`` of L positions."""
        both = torch.cat([self.input_layernorm(embeds_LH), self.hidden_norm(hidden_LH)], dim=-1)
        q, k, v = (self.self_attn[f"{name}_proj"](both).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
        q, k = apply_rotary_pos_emb(q[None], k[None], *rotation, unsqueeze_dim=2)
        return q[0], (k[0], v)

    def rest(
        self,
        query_LND: Tensor,
        known: tuple[Tensor, Tensor],
        mask_LM: Tensor,
        hidden_LH: Tensor,
        steps: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """The layer's output before the final norm, ``[L, H]``: each position attends to the M known ones that its mask
        allows, and to entry l of each of the ``steps``."""
        keys, values = known
        groups = query_LND.shape[1] // keys.shape[1]
        grouped = query_LND.unflatten(1, (-1, groups))  # [L, KV heads, groups, D]
        scores = torch.einsum("lngd,mnd->lngm", grouped, keys).masked_fill(~mask_LM[:, None, None], -torch.inf)
        own = [torch.einsum("lngd,lnd->lng", grouped, k)[..., None] for k, _ in steps or []]
        weights = torch.cat([scores, *own], dim=-1).mul(self.head_dim**-0.5).softmax(dim=-1)
        mixed = torch.einsum("lngm,mnd->lngd", weights[..., : len(keys)], values)
        for j, (_, v) in enumerate(steps or []):
            mixed = mixed + weights[..., len(keys) + j, None] * v[:, :, None]
        residual = (self.hidden_norm(hidden_LH) if self.norm_before_residual else hidden_LH) + self.self_attn["o_proj"](
            mixed.flatten(1)
        )
        return residual + self.mlp(self.post_attention_layernorm(residual))


def new_head(target: Any, layer_ids: tuple[int, ...], draft_ids_V: Int[Tensor, " V"] | None = None) -> Eagle3Head:
    """An untrained head for a Llama-like ``target`` (a transformers model), with the target's last norm and output head.

    ``layer_ids``: the target's layers whose *inputs* are its features.  ``draft_ids_V``: the target's tokens that it can draft,
    ascending; None: all of them.
    """
    theirs = target.config.get_text_config()
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    ids = torch.arange(theirs.vocab_size) if draft_ids_V is None else draft_ids_V
    config = LlamaConfig(
        architectures=[ARCHITECTURE],
        hidden_size=theirs.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=theirs.num_attention_heads,
        num_key_value_heads=theirs.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=theirs.vocab_size,
        draft_vocab_size=len(ids),
        max_position_embeddings=theirs.max_position_embeddings,
        rms_norm_eps=theirs.rms_norm_eps,
        rope_parameters=theirs.rope_parameters,
        hidden_act="silu",
        tie_word_embeddings=False,
        eagle_aux_hidden_state_layer_ids=list(layer_ids),
        dtype="float32",
    )
    head = Eagle3Head(config)
    with torch.no_grad():
        head.d2t.copy_(ids - torch.arange(len(ids)))
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[ids])
        head.norm.weight.copy_(target.get_submodule("model.norm").weight)
        head.fc.weight.zero_()
        for block in head.fc.weight.split(theirs.hidden_size, dim=1):  # begins as the mean of the features
            block.copy_(torch.eye(theirs.hidden_size) / len(layer_ids))
    return head


def _problems(config: LlamaConfig) -> list[str]:
    found = []
    if not getattr(config, "eagle_aux_hidden_state_layer_ids", None):
        found.append("config.json lacks eagle_aux_hidden_state_layer_ids, the target's layers whose inputs are its features")
    if config.num_hidden_layers != 1:
        found.append(f"num_hidden_layers: got {config.num_hidden_layers}, expected 1")
    for key, only in UNSUPPORTED.items():
        if (got := getattr(config, key, only)) != only:
            found.append(f"{key}: got {got}, expected {only}")
    return found
