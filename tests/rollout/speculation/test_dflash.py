"""The DFlash twin: one pass over all anchors is the plain transformer over [context; token, masks], however it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from slipstream.rollout.speculation.context import Context
from slipstream.rollout.speculation.dflash import DFlashHead

VOCABULARY, HIDDEN, MASK = 40, 32, 39
NEAR = {"rtol": 1e-5, "atol": 1e-4}  # float32, logits of up to 20


def config(**changed: object) -> Qwen3Config:
    special = {"mask_token_id": MASK, "target_layer_ids": [1, 2]}
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        dflash_config=special | changed,
    )


@pytest.fixture(scope="module")
def head() -> DFlashHead:
    torch.manual_seed(1)
    made = DFlashHead(config())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return made


@pytest.fixture(scope="module")
def tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(VOCABULARY, HIDDEN, generator=generator), torch.randn(VOCABULARY, HIDDEN, generator=generator)


def context_of(length: int, sequence: int = 0) -> Context:
    generator = torch.Generator().manual_seed(sequence)
    return Context(
        next_ids_S=torch.randint(0, VOCABULARY - 1, (length,), generator=generator),
        features_SF=torch.randn(length, 2 * HIDDEN, generator=generator),
        positions_S=torch.arange(length) + 3,
        sequence_S=torch.full((length,), sequence),
    )


def naive(head: DFlashHead, context: Context, embedding: Tensor, output_head: Tensor, anchor: int, tokens: int) -> Tensor:
    """One anchor: plain attention of its queries over the context up to it and over themselves, without any mask."""
    states = head.hidden_norm(head.fc(context.features_SF[: anchor + 1]))
    x = embedding[torch.tensor([int(context.next_ids_S[anchor])] + [MASK] * tokens)]
    here = context.positions_S[: anchor + 1]
    positions = torch.cat([here, here[-1] + 1 + torch.arange(tokens + 1)])
    cos, sin = head.rotary(x, positions[None])
    for layer in head.layers:
        a, normed = layer.self_attn, layer.input_layernorm(x)
        both = torch.cat([states, normed])
        k = a["k_norm"](a["k_proj"](both).view(len(both), 2, 8)).transpose(0, 1)
        v = a["v_proj"](both).view(len(both), 2, 8).transpose(0, 1)
        q = a["q_norm"](a["q_proj"](normed).view(len(x), 4, 8)).transpose(0, 1)
        q, _ = apply_rotary_pos_emb(q[None], q[None], cos[:, anchor + 1 :], sin[:, anchor + 1 :])
        _, k = apply_rotary_pos_emb(k[None], k[None], cos, sin)
        mixed = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v[None].repeat_interleave(2, 1))
        x = x + a["o_proj"](mixed[0].transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return head.norm(x[1:]) @ output_head.T


def test_one_pass_over_all_anchors_is_each_anchor_alone(head: DFlashHead, tables: tuple[Tensor, Tensor]) -> None:
    context, anchors = context_of(6), torch.tensor([0, 3, 5])
    logits = head(context, *tables, anchors, 3).logits_KAV
    for a, anchor in enumerate(anchors.tolist()):
        torch.testing.assert_close(logits[:, a], naive(head, context, *tables, anchor, 3), **NEAR)


def part(context: Context, which: slice) -> tuple[Tensor, ...]:
    return tuple(getattr(context, name)[which] for name in ("next_ids_S", "features_SF", "positions_S", "sequence_S"))


def test_a_context_behind_cached_keys_and_values_is_the_whole_context(head: DFlashHead, tables: tuple[Tensor, Tensor]) -> None:
    context = context_of(6)
    whole = head(context, *tables, torch.tensor([5]), 3).logits_KAV
    past = head(Context(*part(context, slice(4))), *tables, torch.tensor([0]), 1).past
    cut = head(Context(*part(context, slice(4, None)), past), *tables, torch.tensor([1]), 3).logits_KAV
    torch.testing.assert_close(cut, whole, **NEAR)


def test_sequences_in_one_row_do_not_see_each_other(head: DFlashHead, tables: tuple[Tensor, Tensor]) -> None:
    alone, other = context_of(6, 0), context_of(5, 1)
    both = Context(*(torch.cat(pair) for pair in zip(part(other, slice(None)), part(alone, slice(None)), strict=True)))
    packed = head(both, *tables, torch.tensor([5 + 2]), 2).logits_KAV
    torch.testing.assert_close(packed, head(alone, *tables, torch.tensor([2]), 2).logits_KAV, **NEAR)


def test_every_parameter_of_the_head_learns(head: DFlashHead, tables: tuple[Tensor, Tensor]) -> None:
    logits = head(context_of(6), *tables, torch.tensor([2, 5]), 2).logits_KAV
    gradients = torch.autograd.grad(logits.logsumexp(-1).sum(), list(head.parameters()))
    assert all(g.abs().sum() > 0 for g in gradients)


def test_a_saved_head_is_the_same_head(head: DFlashHead, tables: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    head.save(tmp_path)
    again, asked = DFlashHead.load(tmp_path), (context_of(6), *tables, torch.tensor([5]), 2)
    assert (again.mask_id, again.layer_ids) == (MASK, (1, 2))
    assert torch.equal(again(*asked).logits_KAV, head(*asked).logits_KAV)


def test_a_variant_that_the_twin_would_not_reproduce_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dflash_config.use_swa: got True, expected False"):
        DFlashHead(config(use_swa=True))
