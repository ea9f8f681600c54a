"""The EAGLE-3 twin: unrolled in one pass it is the token-by-token head, however the context is cut, cached or packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from slipstream.rollout.speculation.context import Context
from slipstream.rollout.speculation.eagle3 import Eagle3Head, new_head

VOCABULARY, HIDDEN, LAYERS = 40, 32, (1, 2, 3)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def head(target: LlamaForCausalLM) -> Eagle3Head:
    torch.manual_seed(1)
    made = new_head(target, LAYERS, torch.arange(0, VOCABULARY, 2))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return made


def context_of(ids: list[int], sequence: int = 0, first: int = 0) -> Context:
    """``ids`` and what comes after each; the features are anything."""
    generator = torch.Generator().manual_seed(sequence)
    features = torch.randn(len(ids) - 1, HIDDEN * len(LAYERS), generator=generator)
    return Context(
        next_ids_S=torch.tensor(ids[1:]),
        features_SF=features,
        positions_S=torch.arange(first, first + len(ids) - 1),
        sequence_S=torch.full((len(ids) - 1,), sequence),
    )


def naive(head: Eagle3Head, context: Context, embedding: Tensor, anchor: int, drafts: list[int]) -> Tensor:
    """One token after another with a growing cache, plain attention over repeated KV heads: ``[K, V]``."""
    layer, keys, values = head.midlayer, [], []

    def one(token: int, features: Tensor, position: int) -> Tensor:
        x = torch.cat([layer.input_layernorm(embedding[token]), layer.hidden_norm(features)])
        q, k, v = (layer.self_attn[f"{n}_proj"](x).view(1, -1, 1, 8) for n in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *head.rotary(x, torch.tensor([[position]])))
        keys.append(k)
        values.append(v)
        mixed = F.scaled_dot_product_attention(
            q, torch.cat(keys, 2).repeat_interleave(2, 1), torch.cat(values, 2).repeat_interleave(2, 1)
        )
        residual = features + layer.self_attn["o_proj"](mixed.flatten())
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    for s in range(anchor + 1):
        hidden = one(int(context.next_ids_S[s]), head.fc(context.features_SF[s]), int(context.positions_S[s]))
    found = [head.lm_head(head.norm(hidden))]
    for j, draft in enumerate(drafts):
        hidden = one(draft, hidden, int(context.positions_S[anchor]) + j + 1)
        found.append(head.lm_head(head.norm(hidden)))
    return torch.stack(found)


IDS = [3, 14, 15, 9, 26, 5, 35, 8]


def test_an_unrolled_pass_is_the_head_token_by_token(head: Eagle3Head, target: LlamaForCausalLM) -> None:
    context, embedding = context_of(IDS, first=2), target.get_input_embeddings().weight
    anchors, drafts = torch.tensor([0, 4, 6]), torch.tensor([[1, 2], [3, 4], [5, 6]])
    logits = head(context, embedding, anchors, drafts).logits_KAV
    assert logits.shape == (3, 3, VOCABULARY // 2)
    for a in range(3):
        expected = naive(head, context, embedding, int(anchors[a]), drafts[a].tolist())
        torch.testing.assert_close(logits[:, a], expected, rtol=1e-5, atol=1e-5)


def test_a_context_behind_cached_keys_and_values_is_the_whole_context(head: Eagle3Head, target: LlamaForCausalLM) -> None:
    context, embedding = context_of(IDS), target.get_input_embeddings().weight
    whole = head(context, embedding, torch.tensor([6]), torch.tensor([[1, 2, 3]]))
    first = Context(*(getattr(context, f)[:4] for f in ("next_ids_S", "features_SF", "positions_S", "sequence_S")))
    nothing = torch.zeros(0, dtype=torch.long)
    past = head(first, embedding, nothing, nothing.view(0, 0)).past
    rest = Context(*(getattr(context, f)[4:] for f in ("next_ids_S", "features_SF", "positions_S", "sequence_S")), past)
    cut = head(rest, embedding, torch.tensor([2]), torch.tensor([[1, 2, 3]]))
    torch.testing.assert_close(cut.logits_KAV, whole.logits_KAV, rtol=1e-5, atol=1e-5)
    assert len(past.keys[0]) == 4 and not past.keys[0].requires_grad


def test_sequences_in_one_row_do_not_see_each_other(head: Eagle3Head, target: LlamaForCausalLM) -> None:
    embedding, alone, other = target.get_input_embeddings().weight, context_of(IDS, 0), context_of(IDS[::-1], 1)
    both = Context(
        *(
            torch.cat([getattr(c, f) for c in (other, alone)])
            for f in ("next_ids_S", "features_SF", "positions_S", "sequence_S")
        )
    )
    drafts = torch.tensor([[7, 8]])
    packed = head(both, embedding, torch.tensor([7 + 3]), drafts).logits_KAV
    torch.testing.assert_close(packed, head(alone, embedding, torch.tensor([3]), drafts).logits_KAV, rtol=1e-5, atol=1e-5)


def test_every_parameter_of_the_head_learns_and_the_embedding_does_not(head: Eagle3Head, target: LlamaForCausalLM) -> None:
    embedding = target.get_input_embeddings().weight.detach()
    logits = head(context_of(IDS), embedding, torch.tensor([5, 6]), torch.tensor([[1], [2]])).logits_KAV
    gradients = torch.autograd.grad(logits.logsumexp(-1).sum(), list(head.parameters()))
    assert all(g.abs().sum() > 0 for g in gradients)


def test_a_saved_head_is_the_same_head(head: Eagle3Head, target: LlamaForCausalLM, tmp_path: Path) -> None:
    head.save(tmp_path)
    again = Eagle3Head.load(tmp_path)
    assert again.layer_ids == LAYERS and torch.equal(again.target_ids_V, torch.arange(0, VOCABULARY, 2))
    asked = (context_of(IDS), target.get_input_embeddings().weight, torch.tensor([6]), torch.tensor([[1, 2]]))
    assert torch.equal(again(*asked).logits_KAV, head(*asked).logits_KAV)


def test_a_variant_that_the_twin_would_not_reproduce_is_refused() -> None:
    config = LlamaConfig(hidden_size=32, num_hidden_layers=2, norm_before_fc=True)
    with pytest.raises(
        ValueError, match=r"eagle_aux_hidden_state_layer_ids.*num_hidden_layers: got 2.*norm_before_fc: got True"
    ):
        Eagle3Head(config)
