"""The table of KL estimators, all eight rows, exactly: expectations are sums over a six-way categorical, not samples."""

import math

import pytest
import torch

from slipstream.algos.kl import adapted_coefficient, kl_loss, kl_value


@pytest.fixture
def policies():
    """Log-probabilities of a policy (with its logits) and of a reference."""
    logits_V = torch.tensor([0.1, -0.7, 1.2, 0.4, -1.5, 0.0], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([-0.3, 0.5, 0.2, 1.1, -0.2, -0.9], dtype=torch.float64).log_softmax(-1)
    return logits_V, logits_V.log_softmax(-1), reference_V


def gradient(value, logits_V):
    return torch.autograd.grad(value, logits_V, retain_graph=True)[0]


def reverse_kl_gradient(logits_V, logprobs_V, reference_V):
    return gradient((logprobs_V.exp() * (logprobs_V - reference_V)).sum(), logits_V)


def forward_kl_gradient(logits_V, logprobs_V, reference_V):
    return gradient((reference_V.exp() * (reference_V - logprobs_V)).sum(), logits_V)


def expected_loss_gradient(loss_V, logits_V, logprobs_V):
    """E over y ~ policy of the gradient of the loss of y; nothing differentiates through the sampling."""
    return gradient((logprobs_V.exp().detach() * loss_V).sum(), logits_V)


def close(found_V, expected_V):
    torch.testing.assert_close(found_V, expected_V, rtol=0, atol=1e-12)


def test_k1_in_the_loss_has_no_gradient(policies):
    logits_V, logprobs_V, reference_V = policies
    found_V = expected_loss_gradient(kl_value(logprobs_V, reference_V, "k1"), logits_V, logprobs_V)
    close(found_V, torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_loss_has_the_gradient_of_the_reverse_kl(policies, estimator):
    logits_V, logprobs_V, reference_V = policies
    found_V = expected_loss_gradient(kl_loss(logprobs_V, reference_V, estimator), logits_V, logprobs_V)
    close(found_V, reverse_kl_gradient(*policies))


def test_plain_k3_in_the_loss_has_the_gradient_of_the_forward_kl(policies):
    logits_V, logprobs_V, reference_V = policies
    found_V = expected_loss_gradient(kl_value(logprobs_V, reference_V, "k3"), logits_V, logprobs_V)
    close(found_V, forward_kl_gradient(*policies))
    assert (found_V - reverse_kl_gradient(*policies)).abs().max() > 0.03  # the two directions differ here


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_in_the_reward(policies, estimator):
    """-value as a reward: k1 gives the reverse KL's gradient, k3 the reverse minus the forward, k2 neither."""
    logits_V, logprobs_V, reference_V = policies
    score_V = kl_value(logprobs_V, reference_V, estimator).detach() * logprobs_V
    found_V = expected_loss_gradient(score_V, logits_V, logprobs_V)
    reverse_V, forward_V = reverse_kl_gradient(*policies), forward_kl_gradient(*policies)
    if estimator == "k1":
        close(found_V, reverse_V)
    elif estimator == "k3":
        close(found_V, reverse_V - forward_V)
    else:
        assert (found_V - reverse_V).abs().max() > 0.05


def test_k3_weighted_by_the_ratio_has_the_gradient_of_the_reverse_kl(policies):
    """Samples of another policy, ρ = π / π_b differentiable (DeepSeek-V3.2): exact, unlike plain k3."""
    logits_V, logprobs_V, reference_V = policies
    behaviour_V = torch.tensor([0.5, -0.1, 0.3, -0.8, 0.2, 0.0], dtype=torch.float64).log_softmax(-1)
    loss_V = (logprobs_V - behaviour_V).exp() * kl_value(logprobs_V, reference_V, "k3")
    close(gradient((behaviour_V.exp() * loss_V).sum(), logits_V), reverse_kl_gradient(*policies))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_loss_of_another_policys_samples_is_right_when_weighted(policies, estimator):
    """As the objective has it (``kl.importance``): sg(π / π_b) · kl_loss is exact under y ~ π_b; unweighted it is biased."""
    logits_V, logprobs_V, reference_V = policies
    behaviour_V = torch.tensor([0.5, -0.1, 0.3, -0.8, 0.2, 0.0], dtype=torch.float64).log_softmax(-1)
    loss_V = kl_loss(logprobs_V, reference_V, estimator)
    weight_V = (logprobs_V - behaviour_V).exp().detach()
    close(gradient((behaviour_V.exp() * weight_V * loss_V).sum(), logits_V), reverse_kl_gradient(*policies))
    plain_V = gradient((behaviour_V.exp() * loss_V).sum(), logits_V)
    assert (plain_V - reverse_kl_gradient(*policies)).abs().max() > 0.03


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_values_are_unbiased(policies, estimator):
    _, logprobs_V, reference_V = policies
    expected = (logprobs_V.exp() * (logprobs_V - reference_V)).sum()
    torch.testing.assert_close((logprobs_V.exp() * kl_value(logprobs_V, reference_V, estimator)).sum(), expected)


def test_literal_values():
    # x = ln 2: k1 = 0.6931472, k2 = 0.2402265, k3 = 1/2 - 1 + ln 2 = 0.1931472; x = -ln 2: k3 = 2 - 1 - ln 2 = 0.3068528
    logprobs_T, reference_T = torch.tensor([-1.0, -1.0]), torch.tensor([-1 - math.log(2), -1 + math.log(2)])
    for estimator, expected in (("k1", [0.6931472, -0.6931472]), ("k2", [0.2402265] * 2), ("k3", [0.1931472, 0.3068528])):
        torch.testing.assert_close(kl_value(logprobs_T, reference_T, estimator), torch.tensor(expected))
    for estimator in ("k2", "k3"):
        assert torch.equal(kl_loss(logprobs_T, reference_T, estimator), kl_value(logprobs_T, reference_T, estimator))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_straight_through_gradient_is_x(estimator):
    logprobs_T = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    reference_T = torch.tensor([-3.0, -1.0, -0.5], requires_grad=True)
    kl_loss(logprobs_T, reference_T, estimator).sum().backward()
    assert logprobs_T.grad.tolist() == [2.0, -1.0, 0.0]
    assert reference_T.grad is None


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_loss_against_finite_differences_of_k2(estimator):
    """k2's own value, and what k3's value is given in place of its own slope, 1 − e^(−x)."""
    logprobs_T = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    reference_T = torch.tensor([-3.0, -1.0, -0.7], dtype=torch.float64)
    (found_T,) = torch.autograd.grad(kl_loss(logprobs_T, reference_T, estimator).sum(), logprobs_T)
    there_T, back_T = (kl_value(logprobs_T.detach() + h, reference_T, "k2") for h in (1e-6, -1e-6))
    torch.testing.assert_close(found_T, (there_T - back_T) / 2e-6, rtol=1e-8, atol=0)


def test_extreme_ratios_stay_finite():
    # x = +-1e4 in float32: k3 = 1e4 - 1 above; below, e^(-x) stops at e^20, so k3 = e^20 - 1 - 20
    logprobs_T = torch.tensor([0.0, -1e4], requires_grad=True)
    reference_T = torch.tensor([-1e4, 0.0])
    loss_T = kl_loss(logprobs_T, reference_T, "k3")
    torch.testing.assert_close(loss_T.detach(), torch.tensor([9999.0, math.exp(20) - 21]))
    loss_T.sum().backward()
    assert logprobs_T.grad.tolist() == [1e4, -1e4]


def test_k3_of_a_small_ratio_is_not_lost_to_rounding():
    # x = 1e-3: x^2/2 - x^3/6 = 4.998334e-7; e^-x - 1 + x in float32 without expm1 has an error of 6e-8
    found_T = kl_value(torch.tensor([-1.0 + 1e-3]).double(), torch.tensor([-1.0]).double(), "k3")
    torch.testing.assert_close(found_T, torch.tensor([4.998334e-7]).double(), rtol=1e-4, atol=0)
    narrow_T = kl_value(torch.tensor([1e-3]), torch.tensor([0.0]), "k3")
    torch.testing.assert_close(narrow_T, torch.tensor([4.998334e-7]), rtol=1e-3, atol=0)


def test_refused_estimators():
    zeros_T = torch.zeros(1)
    with pytest.raises(ValueError, match="got 'k1', expected 'k2' or 'k3'; k1 has zero expected gradient"):
        kl_loss(zeros_T, zeros_T, "k1")
    with pytest.raises(ValueError, match="got 'k4', expected 'k1', 'k2' or 'k3'"):
        kl_value(zeros_T, zeros_T, "k4")


@pytest.mark.parametrize(
    ("observed", "expected"),  # target 5, horizon 1000, 100 responses, from 0.1: at most a fifth of a tenth up or down
    [
        (5.0, 0.1),
        (5.5, 0.1 * (1 + 0.1 * 0.1)),
        (10.0, 0.102),
        (1000.0, 0.102),
        (0.0, 0.098),
        (-3.0, 0.098),  # k1 of a few responses may be negative
    ],
)
def test_adaptive_coefficient(observed, expected):
    found = adapted_coefficient(0.1, observed, target=5.0, horizon=1000, samples=100)
    assert found == pytest.approx(expected, rel=1e-12)


def test_an_adaptive_coefficient_holds_its_target():
    """A policy whose KL is 1 / coefficient: from 0.01 (100 nats) the coefficient goes to 1 / 5, and stays."""
    coefficient = 0.01
    for _ in range(400):
        coefficient = adapted_coefficient(coefficient, 1 / coefficient, target=5.0, horizon=1000, samples=200)
    assert coefficient == pytest.approx(0.2, rel=1e-6)
