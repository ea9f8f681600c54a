import math
from dataclasses import replace

import pytest
import torch

from slipstream.algos.losses import (
    LOSSES,
    PolicyTerms,
    SurrogateConfig,
    cispo,
    clipped_surrogate,
    dppo_tv,
    gspo,
    token_cross_entropy,
)

PLAIN = SurrogateConfig(clip_low=0.2, clip_high=0.3, dual_clip=None)
DUAL = replace(PLAIN, dual_clip=3.0)


def terms_of(ratios, advantages, *, sequences=None, proximal=-2.0, behaviour=None, dtype=torch.float64):
    """Terms whose u are ``ratios``; log-probabilities require grad.  π_b is π_prox unless given."""
    proximal_T = torch.full((len(ratios),), proximal, dtype=dtype)
    return PolicyTerms(
        logprobs_T=(proximal_T + torch.tensor(ratios, dtype=dtype).log()).requires_grad_(),
        proximal_T=proximal_T,
        behaviour_T=proximal_T if behaviour is None else torch.tensor(behaviour, dtype=dtype).log(),
        advantages_T=torch.tensor(advantages, dtype=dtype),
        sequence_T=torch.tensor(sequences or range(len(ratios))),
    )


def slopes(function, terms, config):
    """(loss, d Σ loss / d log π, cut) per token."""
    loss_T, cut_T = function(terms, config)
    (slope_T,) = torch.autograd.grad(loss_T.sum(), terms.logprobs_T)
    return loss_T.tolist(), slope_T.tolist(), cut_T.tolist()


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
@pytest.mark.parametrize("function", [clipped_surrogate, gspo])  # of a sequence of one token, they are the same
def test_literal_values_and_slopes(function, ratio, advantage, config, loss, slope):
    found = slopes(function, terms_of([ratio], [advantage]), config)
    assert found == ([pytest.approx(loss)], [pytest.approx(slope)], [slope == 0 and advantage != 0])


def test_gspo_by_hand():
    """Sequence 0 has u = 2, 1/2, 1.728: s = 1.728^(1/3) = 1.2, inside 1.3.  Sequence 1 has u = 1.6 twice: s = 1.6, clipped.

    A = 1: losses −1.2 and −1.3.  d Σ_t loss_t / d log π of a token = Σ_t −s / n = −1.2 in sequence 0, and 0 in sequence 1.
    """
    terms = terms_of([2.0, 0.5, 1.6, 1.728, 1.6], [1.0] * 5, sequences=[0, 0, 1, 0, 1])
    loss, slope, cut = slopes(gspo, terms, PLAIN)
    assert loss == pytest.approx([-1.2, -1.2, -1.3, -1.2, -1.3])
    assert slope == pytest.approx([-1.2, -1.2, 0.0, -1.2, 0.0])
    assert cut == [False, False, True, False, True]


def test_gspo_under_sequence_mean_is_the_sequence_objective():
    """Value and gradient of Σ_t (1/n) loss_t = −min(s A, clip(s) A), autograd of the sequence objective written out."""
    terms = terms_of([1.1, 0.7, 1.2, 0.9], [-0.7] * 4, sequences=[0, 0, 0, 0])
    value = gspo(terms, PLAIN).loss_T.mean()
    ratio = (terms.logprobs_T - terms.proximal_T).mean().exp()
    expected = -torch.minimum(ratio * -0.7, ratio.clamp(0.8, 1.3) * -0.7)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(x, terms.logprobs_T, retain_graph=True)[0] for x in (value, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)
    assert gradients[0].abs().min() > 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "slope"),  # slope: -clip(u, 1 - low, 1.3) A, whatever is clipped
    [
        (1.0, 2.0, 0.2, -2.0),
        (5.0, 2.0, 0.2, -2.6),  # 1.3 * 2: the token keeps its gradient
        (5.0, -2.0, 0.2, 2.6),
        (0.1, -2.0, 0.2, 1.6),  # 0.8 * 2
        (0.1, -2.0, None, 0.2),  # no lower clip
    ],
)
def test_cispo(ratio, advantage, low, slope):
    terms = terms_of([ratio], [advantage])
    loss, found, cut = slopes(cispo, terms, replace(PLAIN, clip_low=low))
    assert found == [pytest.approx(slope)] and cut == [False]
    assert loss == [pytest.approx(slope * terms.logprobs_T.item())]  # the value is weight * A * log π, and means little


@pytest.mark.parametrize(
    ("probability", "behaviour", "advantage", "cut"),
    [
        (0.6, 0.2, 1.0, True),  # rose by 0.4 > 0.3
        (0.45, 0.2, 1.0, False),  # rose by 0.25
        (0.6, 0.2, -1.0, False),  # A pulls it back
        (0.2, 0.5, -1.0, True),  # fell by 0.3 > 0.2
        (0.35, 0.5, -1.0, False),
        (0.2, 0.5, 1.0, False),
        (0.02, 0.001, 1.0, False),  # a ratio of 20, but a rare token: the reason for this loss
    ],
)
def test_dppo_masks_by_the_distance_from_the_behaviour_policy(probability, behaviour, advantage, cut):
    """π_prox = 0.25 throughout: it gives u, and has no part in the mask."""
    ratio = probability / 0.25
    terms = terms_of([ratio], [advantage], proximal=math.log(0.25), behaviour=[behaviour])
    loss, slope, found = slopes(dppo_tv, terms, PLAIN)
    assert loss == [pytest.approx(-ratio * advantage)] and found == [cut]
    assert slope == [0.0 if cut else pytest.approx(-ratio * advantage)]


@pytest.mark.parametrize("name", LOSSES)
def test_no_gradient_reaches_the_other_policies(name):
    terms = terms_of([0.9, 1.1], [1.0, -1.0], sequences=[0, 0])
    for other in (terms.proximal_T, terms.behaviour_T):
        other.requires_grad_()
    loss_T, cut_T = LOSSES[name](terms, PLAIN)
    loss_T.sum().backward()
    assert terms.proximal_T.grad is None and terms.behaviour_T.grad is None and not cut_T.requires_grad


@pytest.mark.parametrize("name", LOSSES)
def test_the_behaviour_weight_is_not_in_the_loss(name):
    """It is multiplied in once, by the objective: another π_b changes no loss (dppo's mask does not act here)."""
    near, far = (terms_of([0.95, 1.05], [1.0, -1.0], behaviour=b) for b in ([0.13, 0.14], [0.2, 0.05]))
    assert torch.equal(LOSSES[name](near, PLAIN).loss_T, LOSSES[name](far, PLAIN).loss_T)


@pytest.mark.parametrize("name", LOSSES)
def test_first_inner_step_may_pass_the_current_policy_as_proximal(name):
    logprobs_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    terms = PolicyTerms(
        logprobs_T=logprobs_T,
        proximal_T=logprobs_T,
        behaviour_T=logprobs_T.detach(),
        advantages_T=torch.tensor([0.5, -3.0]),
        sequence_T=torch.tensor([0, 1]),
    )
    LOSSES[name](terms, PLAIN).loss_T.sum().backward()
    assert logprobs_T.grad.tolist() == [-0.5, 3.0]  # -A


@pytest.mark.parametrize(("name", "config"), [("clipped_surrogate", DUAL), ("gspo", PLAIN), ("dppo_tv", PLAIN)])
def test_gradient_matches_finite_differences(name, config):
    """Away from the kinks at 0.8, 1.3 and 3, of the tokens or (two each) of the sequences.  dppo's value does not know its
    mask, so it is tried where nothing is masked."""
    ratios = [0.9, 0.95, 1.1, 1.2] * 2 if name == "dppo_tv" else [0.3, 0.95, 1.1, 1.6, 4.0, 3.5] * 2
    half = len(ratios) // 2
    pairs = [i // 2 for i in range(len(ratios))]
    terms = terms_of(ratios, [1.3] * half + [-0.7] * half, sequences=pairs if name == "gspo" else None)
    function = LOSSES[name]
    assert torch.autograd.gradcheck(lambda x_T: function(replace(terms, logprobs_T=x_T), config).loss_T, terms.logprobs_T)


def test_cispo_against_finite_differences_with_its_weight_frozen():
    terms = terms_of([0.3, 0.95, 1.6] * 2, [1.3] * 3 + [-0.7] * 3)
    weight_T = torch.tensor([0.8, 0.95, 1.3] * 2, dtype=torch.float64)
    step = 1e-6
    _, slope, _ = slopes(cispo, terms, PLAIN)
    frozen_T = [-weight_T * terms.advantages_T * (terms.logprobs_T.detach() + h) for h in (step, -step)]
    assert slope == pytest.approx(((frozen_T[0] - frozen_T[1]) / (2 * step)).tolist(), rel=1e-6)


@pytest.mark.parametrize("name", [n for n in LOSSES if n != "cispo"])
@pytest.mark.parametrize("config", [PLAIN, DUAL])
def test_cut_is_where_the_gradient_vanishes(name, config):
    generator = torch.Generator().manual_seed(0)
    ratios = (1.5 * torch.randn(400, generator=generator)).exp().clamp(max=7).tolist()
    sequences = [i // 2 for i in range(400)]
    advantages = torch.randn(200, generator=generator).repeat_interleave(2).tolist()
    terms = terms_of(ratios, advantages, sequences=sequences)
    loss_T, cut_T = LOSSES[name](terms, config)
    loss_T.sum().backward()
    assert torch.equal(cut_T, terms.logprobs_T.grad == 0)
    assert 0.1 < cut_T.double().mean() < 0.9  # the case is not trivial


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_probabilities_stay_finite(name):
    extremes_T = torch.tensor([-1e4, -1e4, 0.0, 0.0], requires_grad=True)
    terms = PolicyTerms(
        logprobs_T=extremes_T,
        proximal_T=torch.tensor([0.0, 0.0, -1e4, -1e4]),
        behaviour_T=torch.tensor([-1e4, 0.0, 0.0, -1e4]),
        advantages_T=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        sequence_T=torch.arange(4),
    )
    loss_T, _ = LOSSES[name](terms, DUAL)
    loss_T.sum().backward()
    assert loss_T.isfinite().all() and extremes_T.grad.isfinite().all()


def test_cross_entropy():
    assert token_cross_entropy(torch.tensor([-0.5, -2.0])).tolist() == [0.5, 2.0]
