import math
from itertools import product

import pytest
import torch

from slipstream.algos.advantages import batch_advantages, group_advantages, has_signal


def test_grpo():
    # mean 1/4; population variance (9/16 + 3/16) / 4 = 3/16; (3/4) / sqrt(3/16) = sqrt 3, (-1/4) / sqrt(3/16) = -1 / sqrt 3
    found = group_advantages([1, 0, 0, 0], kind="grpo", scale_by_std=True)
    assert found == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3, rel=1e-5)


def test_grpo_epsilon():
    # mean 5e-7, population std 5e-7: +-5e-7 / (5e-7 + 1e-6) = +-1/3
    assert group_advantages([0.0, 1e-6], kind="grpo", scale_by_std=True) == pytest.approx([-1 / 3, 1 / 3])


def test_dr_grpo_does_not_scale():
    assert group_advantages([1, 0, 0, 0], kind="grpo", scale_by_std=False) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_rloo(scale_by_std):
    # the others of 3 are 1 and 2: 3 - 1.5; of 1: 1 - 2.5; of 2: 2 - 2
    assert group_advantages([3, 1, 2], kind="rloo", scale_by_std=scale_by_std) == pytest.approx([1.5, -1.5, 0.0])


def test_reinforce_uses_the_mean_of_the_batch_not_of_the_group():
    # mean of 1, 0, 2, 5 = 2
    assert batch_advantages([[1, 0], [2], [5]], kind="reinforce", scale_by_std=True) == [[-1, -2], [0], [3]]
    assert group_advantages([1, 0], kind="reinforce", scale_by_std=True) == [1, 0]


def test_batch_of_grpo_looks_at_one_group_at_a_time():
    assert batch_advantages([[1, 0], [10, 4]], kind="grpo", scale_by_std=False) == [[0.5, -0.5], [3, -3]]


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
@pytest.mark.parametrize("rewards_G", [[0.1] * 3, [0.7] * 8, [1.0], [], [0.0, -0.0]])
def test_equal_rewards_carry_no_signal(kind, rewards_G):
    # exact zeros: with 0.1 the mean of three is not 0.1, and rounding / (0 + 1e-6) would leave a gradient
    assert not has_signal(rewards_G, kind)
    assert group_advantages(rewards_G, kind=kind, scale_by_std=True) == [0.0] * len(rewards_G)


def test_signal():
    assert has_signal([1.0, 0.0], "grpo") and has_signal([1.0, 0.0], "rloo")
    assert has_signal([1.0, 1.0], "reinforce")


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce"])
def test_empty_batch(kind):
    assert batch_advantages([], kind=kind, scale_by_std=True) == []
    assert batch_advantages([[]], kind=kind, scale_by_std=True) == [[]]


def test_rewards_that_are_not_finite_are_all_named():
    with pytest.raises(ValueError, match=r"group 1 sample 2: nan; group 2 sample 0: -inf, expected finite"):
        batch_advantages([[1.0], [0.0, 1.0, math.nan], [-math.inf]], kind="grpo", scale_by_std=True)
    with pytest.raises(ValueError, match="sample 1: inf"):
        group_advantages([1.0, math.inf], kind="reinforce", scale_by_std=True)


def test_unknown_kind():
    with pytest.raises(ValueError, match="got 'gae', expected 'grpo', 'rloo' or 'reinforce'"):
        has_signal([1.0], "gae")


@pytest.mark.parametrize(("kind", "bias"), [("rloo", 1.0), ("grpo", 2 / 3)])
def test_policy_gradient_by_enumeration(kind, bias):
    """Over all groups of G = 3: leave-one-out is unbiased; the group's own mean shrinks the gradient by 1 - 1/G = 2/3."""
    logits_V = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    rewards = [1.0, 0.2, -0.5]
    prob_V = torch.softmax(logits_V, -1)
    (exact_V,) = torch.autograd.grad((prob_V * torch.tensor(rewards, dtype=torch.float64)).sum(), logits_V)
    log_prob_V = torch.log_softmax(logits_V, -1)
    surrogate = torch.zeros((), dtype=torch.float64)
    for group in product(range(3), repeat=3):
        weight = math.prod(prob_V[y].item() for y in group)
        advantages = group_advantages([rewards[y] for y in group], kind=kind, scale_by_std=False)
        surrogate = surrogate + weight * sum(a * log_prob_V[y] for a, y in zip(advantages, group, strict=True)) / 3
    (found_V,) = torch.autograd.grad(surrogate, logits_V)
    torch.testing.assert_close(found_V, bias * exact_V, rtol=1e-12, atol=1e-12)
