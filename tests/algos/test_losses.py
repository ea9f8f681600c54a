import math
from dataclasses import replace

import pytest
import torch

from slipstream.algos.losses import LOSSES, PolicyTerms, SurrogateConfig, clip_fraction, clipped_surrogate, token_cross_entropy

PLAIN = SurrogateConfig(clip_low=0.2, clip_high=0.3, dual_clip=None, behaviour_cap=None)
DUAL = replace(PLAIN, dual_clip=3.0)


def terms_of(ratios, advantages, weights=None, dtype=torch.float64):
    """Terms whose u are ``ratios`` and whose π_prox / π_b are ``weights``; log-probabilities require grad."""
    proximal_T = torch.full((len(ratios),), -2.0, dtype=dtype)
    return PolicyTerms(
        logprobs_T=(proximal_T + torch.tensor(ratios, dtype=dtype).log()).requires_grad_(),
        proximal_T=proximal_T,
        behaviour_T=proximal_T - torch.tensor(weights or [1.0] * len(ratios), dtype=dtype).log(),
        advantages_T=torch.tensor(advantages, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "config", "loss", "slope"),  # slope: d loss / d log π = -u A where nothing is cut, else 0
    [
        (1.0, 2.0, PLAIN, -2.0, -2.0),
        (1.25, 2.0, PLAIN, -2.5, -2.5),  # inside 1 + 0.3
        (1.5, 2.0, PLAIN, -2.6, 0.0),  # -1.3 * 2
        (0.5, 2.0, PLAIN, -1.0, -1.0),  # a good token that became rare is not cut
        (0.9, -2.0, PLAIN, 1.8, 1.8),
        (0.5, -2.0, PLAIN, 1.6, 0.0),  # 0.8 * 2
        (1.5, -2.0, PLAIN, 3.0, 3.0),  # a bad token that became frequent is not cut
        (5.0, -2.0, PLAIN, 10.0, 10.0),
        (5.0, -2.0, DUAL, 6.0, 0.0),  # min objective bounded below by 3 * -2
        (2.0, -2.0, DUAL, 4.0, 4.0),
        (5.0, 2.0, DUAL, -2.6, 0.0),  # the dual clip leaves positive advantages alone
        (5.0, 0.0, DUAL, 0.0, 0.0),
    ],
)
def test_literal_values_and_slopes(ratio, advantage, config, loss, slope):
    terms = terms_of([ratio], [advantage])
    loss_T = clipped_surrogate(terms, config)
    loss_T.sum().backward()
    assert loss_T.item() == pytest.approx(loss)
    assert terms.logprobs_T.grad.item() == pytest.approx(slope)
    assert clip_fraction(terms, config).tolist() == [slope == 0 and advantage != 0]


def test_behaviour_weight_enters_once_truncated_and_detached():
    # weights 4 -> 2 (cap), 0.5, 1; u = 1 and A = 1: loss -w, slope -w; π_prox and π_b get no gradient
    terms = terms_of([1.0] * 3, [1.0] * 3, weights=[4.0, 0.5, 1.0])
    for name in ("proximal_T", "behaviour_T"):
        getattr(terms, name).requires_grad_()
    loss_T = clipped_surrogate(terms, replace(PLAIN, behaviour_cap=2.0))
    loss_T.sum().backward()
    expected_T = torch.tensor([-2.0, -0.5, -1.0], dtype=torch.float64)
    torch.testing.assert_close(loss_T.detach(), expected_T)
    torch.testing.assert_close(terms.logprobs_T.grad, expected_T)
    assert terms.proximal_T.grad is None and terms.behaviour_T.grad is None


def test_first_inner_step_may_pass_the_current_policy_as_proximal():
    logprobs_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    terms = PolicyTerms(
        logprobs_T=logprobs_T, proximal_T=logprobs_T, behaviour_T=logprobs_T.detach(), advantages_T=torch.tensor([0.5, -3.0])
    )
    clipped_surrogate(terms, PLAIN).sum().backward()
    assert logprobs_T.grad.tolist() == [-0.5, 3.0]  # -A


def test_gradient_matches_finite_differences():
    # away from the kinks at 0.8, 1.3 and 3
    terms = terms_of([0.3, 0.95, 1.1, 1.6, 4.0] * 2, [1.3] * 5 + [-0.7] * 5, weights=[0.5, 1.0, 1.7, 3.0, 9.0] * 2)
    config = replace(DUAL, behaviour_cap=2.0)
    assert torch.autograd.gradcheck(lambda x_T: clipped_surrogate(replace(terms, logprobs_T=x_T), config), terms.logprobs_T)


@pytest.mark.parametrize("config", [PLAIN, DUAL])
def test_clip_fraction_is_where_the_gradient_vanishes(config):
    generator = torch.Generator().manual_seed(0)
    ratios = (1.5 * torch.randn(400, generator=generator)).exp().tolist()
    terms = terms_of(ratios, torch.randn(400, generator=generator).tolist())
    clipped_surrogate(terms, config).sum().backward()
    cut_T = clip_fraction(terms, config)
    assert torch.equal(cut_T, terms.logprobs_T.grad == 0)
    assert 0.3 < cut_T.double().mean() < 0.9  # the case is not trivial


def test_off_policy_gradient_is_exact_while_the_cap_does_not_bind():
    """E over y ~ π_b of the gradient, with π_prox = π_θ, is the policy gradient at π_θ, by enumeration."""
    logits_V = torch.tensor([0.2, -0.5, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    behaviour_V = torch.tensor([0.0, 0.3, 0.1, -0.6], dtype=torch.float64).log_softmax(-1)
    advantages_V = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    logprobs_V = logits_V.log_softmax(-1)
    (exact_V,) = torch.autograd.grad(-(logprobs_V.exp() * advantages_V).sum(), logits_V, retain_graph=True)
    terms = PolicyTerms(logprobs_T=logprobs_V, proximal_T=logprobs_V, behaviour_T=behaviour_V, advantages_T=advantages_V)

    def expected_gradient(cap):
        loss_V = clipped_surrogate(terms, replace(PLAIN, behaviour_cap=cap))
        return torch.autograd.grad((behaviour_V.exp() * loss_V).sum(), logits_V, retain_graph=True)[0]

    torch.testing.assert_close(expected_gradient(10.0), exact_V, rtol=1e-12, atol=1e-12)
    assert (expected_gradient(None) - exact_V).abs().max() > 0.05  # off means off
    assert (expected_gradient(1.0) - exact_V).abs().max() > 0.05  # a binding cap biases


def test_extreme_log_probabilities_stay_finite():
    extremes_T = torch.tensor([-1e4, -1e4, 0.0, 0.0, -math.inf], requires_grad=True)
    terms = PolicyTerms(
        logprobs_T=extremes_T,
        proximal_T=torch.tensor([0.0, 0.0, -1e4, -1e4, -1.0]),
        behaviour_T=torch.tensor([-1e4, 0.0, 0.0, -1e4, -1.0]),
        advantages_T=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]),
    )
    loss_T = clipped_surrogate(terms, replace(DUAL, behaviour_cap=2.0))
    loss_T.sum().backward()
    assert loss_T.isfinite().all() and extremes_T.grad.isfinite().all()


def test_dictionary_and_cross_entropy():
    terms = terms_of([1.1, 0.7], [1.0, -1.0])
    assert torch.equal(LOSSES["clipped_surrogate"](terms, PLAIN), clipped_surrogate(terms, PLAIN))
    assert token_cross_entropy(torch.tensor([-0.5, -2.0])).tolist() == [0.5, 2.0]
