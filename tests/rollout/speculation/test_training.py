"""Making a draft: what it is trained towards, and that training makes it better at the policy's own text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from slipstream.core.mistakes import UserError
from slipstream.core.speculation import Speculation
from slipstream.rollout.speculation.eagle3 import new_head
from slipstream.rollout.speculation.training import (
    DraftModelTrainee,
    Eagle3Trainee,
    Sample,
    Settings,
    expected_acceptance,
    look,
    new_trainee,
    require_plain_head,
    train,
)

VOCABULARY = 24


def llama(layers: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def policy() -> Any:
    return llama(4, seed=0)


@pytest.fixture(scope="module")
def samples(policy: Any) -> list[Sample]:
    torch.manual_seed(1)
    ids = policy.generate(torch.randint(3, VOCABULARY, (24, 4)), do_sample=True, max_new_tokens=24, min_new_tokens=24)
    return [Sample(tuple(row), 4) for row in ids.tolist()]


def settings(steps: int = 60, tokens: int = 3) -> Settings:
    return Settings(steps=steps, batch_size=4, lr=3e-3, temperature=1.0, tokens=tokens, decay=4.0)


def trainee(kind: str, policy: Any) -> Any:
    if kind == "draft_model":
        return DraftModelTrainee(llama(1, seed=5))
    return Eagle3Trainee(new_head(policy, (1, 2, 3), torch.arange(2, VOCABULARY)), policy.get_input_embeddings().weight)


@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_training_lowers_the_loss_and_raises_the_acceptance_of_samples_it_has_not_seen(
    kind: str, policy: Any, samples: list[Sample]
) -> None:
    draft = trainee(kind, policy)
    seen = [look(policy, sample, draft.layer_ids) for sample in samples]
    before = expected_acceptance(draft, policy, seen[20:], settings())
    losses = list(train(draft, policy, seen[:20], settings()))
    after = expected_acceptance(draft, policy, seen[20:], settings())
    assert sum(losses[25:30]) < 0.9 * sum(losses[:5])  # within the first half, where the loss is that of first drafts
    assert all(b > a for a, b in zip(before, after, strict=True)), (before, after)
    assert after[0] > after[1] > after[2]


def test_the_policy_as_its_own_draft_is_always_accepted(policy: Any, samples: list[Sample]) -> None:
    draft = DraftModelTrainee(policy)
    seen = [look(policy, sample, ()) for sample in samples[:3]]
    assert expected_acceptance(draft, policy, seen, settings()) == pytest.approx([1.0, 1.0, 1.0], abs=1e-4)


def test_acceptance_is_the_product_of_min_1_q_over_p_along_the_sample(policy: Any, samples: list[Sample]) -> None:
    """Worked out position by position for a draft model over two steps, with nothing shared but the models."""
    draft, sample = DraftModelTrainee(llama(1, seed=5)), samples[0]
    with torch.no_grad():
        ids = torch.tensor(sample.ids)
        p, q = (F.softmax(m(ids[None]).logits[0], -1) for m in (policy, draft.model))
    kept = [min(1.0, float(q[t, ids[t + 1]] / p[t, ids[t + 1]])) for t in range(3, len(ids) - 1)]
    expected = [sum(kept[:-1]) / (len(kept) - 1), sum(a * b for a, b in pairwise(kept)) / (len(kept) - 1)]
    found = expected_acceptance(draft, policy, [look(policy, sample, ())], settings(tokens=2))
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_head_trains_towards_the_policy_at_the_position_after_its_anchor(policy: Any, samples: list[Sample]) -> None:
    """EAGLE's features at t and token t + 1 draft token t + 2, whose distribution the policy gives at t + 1."""
    draft = trainee("eagle3", policy)
    logits_KAV, anchors_A = draft.drafts(look(policy, samples[0], draft.layer_ids), 2)
    assert logits_KAV.shape == (2, 28 - 1 - 2 - 3, VOCABULARY - 2)
    assert anchors_A.tolist() == list(range(4, 26))  # 3 is the last prompt token; the last two steps end with token 27


@pytest.mark.parametrize(
    ("training", "depth"),
    [
        ({"hidden_size": 32, "layers": 1, "heads": 2}, 1),
        ({"hidden_size": 32, "layers": 3, "heads": 2}, 3),
        ({"first_layers": 1}, 1),
    ],
)
def test_a_draft_model_for_a_policy_that_names_the_kind_of_each_layer(
    training: dict[str, int], depth: int, tiny: Path, tmp_path: Path
) -> None:
    """Qwen3's configuration lists its layers' attention; a saved draft loads, and has as many."""
    policy = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    speculation = Speculation.model_validate({"method": "draft_model", "draft": "d", "training": training})
    new_trainee(speculation, policy, []).save(tmp_path)
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    assert (config.num_hidden_layers, config.layer_types) == (depth, ["full_attention"] * depth)


def test_a_policy_whose_logits_are_more_than_its_output_head_is_refused(policy: Any) -> None:
    """Granite divides them: the distribution that the draft would be taught is not the policy's."""
    require_plain_head(policy)
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shape = {key: getattr(policy.config, key) for key in keys}
    scaled = GraniteForCausalLM(GraniteConfig(**shape, initializer_range=0.3, logits_scaling=4.0)).eval()
    with pytest.raises(UserError, match="bias, scale or soft cap"):
        require_plain_head(scaled)


def test_a_rate_that_diverges_says_so(policy: Any, samples: list[Sample]) -> None:
    draft = DraftModelTrainee(llama(1, seed=5))
    with torch.no_grad():
        next(draft.parameters()).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="step 0 is nan; lower lr"):
        list(train(draft, policy, [look(policy, samples[0], ())], settings(steps=2)))
