import math
from itertools import product

import pytest
import torch

from slipstream.algos.advantages import ADVANTAGES, batch_advantages, has_signal
from slipstream.core.algorithms import OF_GROUPS


def of_group(rewards_G, kind):
    return batch_advantages([rewards_G], kind)[0]


def test_grpo():
    # mean 1/4; population variance (9/16 + 3/16) / 4 = 3/16; (3/4) / sqrt(3/16) = sqrt 3, (-1/4) / sqrt(3/16) = -1 / sqrt 3
    assert of_group([1, 0, 0, 0], "grpo") == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3, rel=1e-5)


def test_grpo_epsilon():
    # mean 5e-7, population std 5e-7: +-5e-7 / (5e-7 + 1e-6) = +-1/3
    assert of_group([0.0, 1e-6], "grpo") == pytest.approx([-1 / 3, 1 / 3])


def test_dr_grpo_does_not_scale():
    assert of_group([1, 0, 0, 0], "dr_grpo") == [0.75, -0.25, -0.25, -0.25]


def test_rloo():
    # the others of 3 are 1 and 2: 3 - 1.5; of 1: 1 - 2.5; of 2: 2 - 2
    assert of_group([3, 1, 2], "rloo") == pytest.approx([1.5, -1.5, 0.0])


def test_reinforce_uses_the_mean_of_the_batch_not_of_the_group():
    # mean of 1, 0, 2, 5 = 2
    assert batch_advantages([[1, 0], [2], [5]], "reinforce") == [[-1, -2], [0], [3]]


def test_reinforce_pp_standardises_over_the_batch():
    # mean 2; deviations -1, -2, 0, 3; population variance (1 + 4 + 0 + 9) / 4 = 3.5
    scale = 1 / (math.sqrt(3.5) + 1e-6)
    found = batch_advantages([[1, 0], [2], [5]], "reinforce_pp")
    assert found == [pytest.approx([-scale, -2 * scale]), pytest.approx([0]), pytest.approx([3 * scale])]


def test_reinforce_pp_baseline_centres_by_group_and_scales_by_batch():
    # centred by group: +-0.5, +-3, whose mean is 0; population variance (0.25 + 0.25 + 9 + 9) / 4 = 4.625
    scale = 1 / (math.sqrt(4.625) + 1e-6)
    found = batch_advantages([[1, 0], [10, 4]], "reinforce_pp_baseline")
    assert found == [pytest.approx([0.5 * scale, -0.5 * scale]), pytest.approx([3 * scale, -3 * scale])]


def test_none_leaves_the_rewards_out():
    assert batch_advantages([[1, 0], [5]], "none") == [[0, 0], [0]] and has_signal([1, 1], "none")


def test_batch_of_group_advantages_looks_at_one_group_at_a_time():
    assert batch_advantages([[1, 0], [10, 4]], "dr_grpo") == [[0.5, -0.5], [3, -3]]


@pytest.mark.parametrize("kind", OF_GROUPS)
@pytest.mark.parametrize("rewards_G", [[0.1] * 3, [0.7] * 8, [1.0], [], [0.0, -0.0]])
def test_equal_rewards_of_a_group_carry_no_signal(kind, rewards_G):
    # exact zeros: with 0.1 the mean of three is not 0.1, and rounding / (0 + 1e-6) would leave a gradient
    assert not has_signal(rewards_G, kind)
    assert of_group(rewards_G, kind) == [0.0] * len(rewards_G)


@pytest.mark.parametrize("kind", ["reinforce", "reinforce_pp"])
def test_equal_rewards_of_a_batch_are_exact_zeros(kind):
    assert batch_advantages([[0.1, 0.1], [0.1]], kind) == [[0.0, 0.0], [0.0]]
    assert has_signal([0.1, 0.1], kind), "the rest of the batch may differ"


def test_signal():
    assert all(has_signal([1.0, 0.0], kind) for kind in ADVANTAGES)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_empty_batch(kind):
    assert batch_advantages([], kind) == []
    assert batch_advantages([[]], kind) == [[]]


def test_rewards_that_are_not_finite_are_all_named():
    with pytest.raises(ValueError, match=r"group 1 sample 2: nan; group 2 sample 0: -inf, expected finite"):
        batch_advantages([[1.0], [0.0, 1.0, math.nan], [-math.inf]], "grpo")
    with pytest.raises(ValueError, match="sample 1: inf"):
        batch_advantages([[1.0, math.inf]], "reinforce")


def test_unknown_kind():
    with pytest.raises(ValueError, match="got 'gea', expected one of grpo, dr_grpo, rloo, reinforce, "):
        has_signal([1.0], "gea")
    with pytest.raises(ValueError, match="got 'gea'"):
        batch_advantages([[1.0]], "gea")


def expected_gradient(kind, groups):
    """Exact gradient of the objective, and the expectation of the estimator's, over all batches of ``groups`` groups of 3."""
    logits_V = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    rewards = [1.0, 0.2, -0.5]
    prob_V = torch.softmax(logits_V, -1)
    (exact_V,) = torch.autograd.grad((prob_V * torch.tensor(rewards, dtype=torch.float64)).sum(), logits_V)
    log_prob_V = torch.log_softmax(logits_V, -1)
    surrogate = torch.zeros((), dtype=torch.float64)
    for drawn in product(range(3), repeat=3 * groups):
        weight = math.prod(prob_V[y].item() for y in drawn)
        batch = [drawn[3 * g : 3 * g + 3] for g in range(groups)]
        advantages = batch_advantages([[rewards[y] for y in group] for group in batch], kind)
        pairs = [(a, y) for a_G, group in zip(advantages, batch, strict=True) for a, y in zip(a_G, group, strict=True)]
        surrogate = surrogate + weight * sum(a * log_prob_V[y] for a, y in pairs) / len(pairs)
    (found_V,) = torch.autograd.grad(surrogate, logits_V)
    return exact_V, found_V


@pytest.mark.parametrize(
    ("kind", "groups", "bias"),
    [
        ("rloo", 1, 1.0),  # the others' mean does not depend on the response: unbiased
        ("dr_grpo", 1, 2 / 3),  # the group's own mean shrinks the gradient by 1 - 1/G
        ("reinforce", 2, 5 / 6),  # the batch's own mean by 1 - 1/N, with N = 6 responses
    ],
)
def test_policy_gradient_by_enumeration(kind, groups, bias):
    exact_V, found_V = expected_gradient(kind, groups)
    torch.testing.assert_close(found_V, bias * exact_V, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["grpo", "reinforce_pp", "reinforce_pp_baseline"])
def test_dividing_by_a_random_deviation_changes_the_direction(kind):
    """The documented bias: for rewards of more than two values no multiple of the gradient comes out, and yet an ascent."""
    exact_V, found_V = expected_gradient(kind, 1)
    cosine = torch.nn.functional.cosine_similarity(exact_V, found_V, dim=0)
    assert 0.9 < cosine < 1 - 1e-5
