"""Estimators of the policy gradient on a chain of three tokens of two kinds: expectations by enumeration, samples from π_b.

The policy is a table of logits for each of the seven prefixes; the reward is of the whole sequence.  ``∇J`` is the gradient
of E_π[R].  What a correction leaves wrong is computed too: a bias that is documented is one that can be written down.
"""

from itertools import product

import pytest
import torch

from slipstream.algos.corrections import Bands, behaviour_ratio, behaviour_weight, rejected
from slipstream.algos.losses import LOSSES, PolicyTerms, SurrogateConfig

LENGTH, VOCABULARY = 3, 2
SEQUENCES = list(product(range(VOCABULARY), repeat=LENGTH))
PREFIXES = [prefix for n in range(LENGTH) for prefix in product(range(VOCABULARY), repeat=n)]
WIDE = SurrogateConfig(clip_low=0.999, clip_high=1e6, dual_clip=None)
"""Nothing is clipped or masked."""
GENERATOR = torch.Generator().manual_seed(1)
LOGITS_PV = torch.randn(len(PREFIXES), VOCABULARY, generator=GENERATOR, dtype=torch.float64).requires_grad_()
BEHAVIOUR_PV = LOGITS_PV.detach() + 0.8 * torch.randn(len(PREFIXES), VOCABULARY, generator=GENERATOR, dtype=torch.float64)
REWARDS = torch.randn(len(SEQUENCES), generator=GENERATOR, dtype=torch.float64)


def logprobs(logits_PV, sequence):
    """[3]: log-probabilities of the tokens of a sequence."""
    table_PV = logits_PV.log_softmax(-1)
    return torch.stack([table_PV[PREFIXES.index(sequence[:t]), y] for t, y in enumerate(sequence)])


def gradient(value):
    return torch.autograd.grad(value, LOGITS_PV)[0]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def far(found, expected):
    return (found - expected).norm() > 0.03 * expected.norm()


def policy_gradient():
    return gradient(sum(logprobs(LOGITS_PV, y).sum().exp() * r for y, r in zip(SEQUENCES, REWARDS, strict=True)))


def estimate(
    loss="clipped_surrogate", level="token", cap=None, *, config=WIDE, behaviour_PV=BEHAVIOUR_PV, proximal_PV=None, by=()
):
    """−E over y ~ π_b of the gradient of Σ_t w_t · loss_t with A = R: what the objective computes, before its denominator."""
    total = torch.zeros((), dtype=torch.float64)
    bands = Bands(icepop=(0.8, 1.3), geometric=(0.9, 1.1), opsm_delta=0.05)
    for y, reward in zip(SEQUENCES, REWARDS, strict=True):
        current_T, behaviour_T = logprobs(LOGITS_PV, y), logprobs(behaviour_PV, y)
        proximal_T = current_T if proximal_PV is None else logprobs(proximal_PV, y)
        terms = PolicyTerms(
            logprobs_T=current_T,
            proximal_T=proximal_T,
            behaviour_T=behaviour_T,
            advantages_T=reward.expand(LENGTH),
            sequence_T=torch.zeros(LENGTH, dtype=torch.int64),
        )
        ratio_T = behaviour_ratio(proximal_T, behaviour_T, terms.sequence_T, level)
        weight_T = behaviour_weight(ratio_T, level=level, cap=cap)
        kept_T = ~rejected(proximal_T, behaviour_T, terms.advantages_T, terms.sequence_T, by=by, bands=bands)
        total = total + behaviour_T.sum().exp() * (kept_T * weight_T * LOSSES[loss](terms, config).loss_T).sum()
    return -gradient(total)


def token_weighted(factor):
    """E over y ~ π_b of Σ_t factor(r_t) R ∇log π_t with r_t = π_θ / π_b of token t, written out."""
    total = torch.zeros((), dtype=torch.float64)
    for y, reward in zip(SEQUENCES, REWARDS, strict=True):
        current_T, behaviour_T = logprobs(LOGITS_PV, y), logprobs(BEHAVIOUR_PV, y)
        ratio_T = (current_T - behaviour_T).detach().exp()
        total = total + behaviour_T.sum().exp() * (factor(ratio_T) * reward * current_T).sum()
    return gradient(total)


@pytest.mark.parametrize("loss", ["clipped_surrogate", "cispo", "dppo_tv"])
def test_the_sequence_weight_is_unbiased(loss):
    close(estimate(loss, "sequence"), policy_gradient())
    assert far(estimate(loss, "none"), policy_gradient()), "uncorrected is not"


def test_the_token_weight_drops_the_ratios_of_the_other_tokens():
    """The documented bias: prefixes are visited, and responses continued, as π_b does; each token by itself is π_θ's.

    Σ_t E_{prefix ~ π_b} E_{y_t ~ π_θ} [∇log π_θ(y_t) · Q_b(prefix, y_t)], with Q_b the expected reward if π_b writes the rest.
    """
    total = torch.zeros((), dtype=torch.float64)
    for t in range(LENGTH):
        for y, reward in zip(SEQUENCES, REWARDS, strict=True):
            current_T, behaviour_T = logprobs(LOGITS_PV, y), logprobs(BEHAVIOUR_PV, y)
            others = (behaviour_T.sum() - behaviour_T[t]).exp()
            total = total + others * current_T[t].exp() * reward  # ∇π = π ∇log π
    close(estimate(), gradient(total))
    assert far(estimate(), policy_gradient())


def test_the_error_of_the_token_weight_is_of_first_order_and_less_than_without():
    """Error over distance is a constant as π_b comes near: the weight takes away a part of the first order, not all of it."""
    exact = policy_gradient()
    for size in (1e-2, 1e-3):
        near_PV = LOGITS_PV.detach() + size * (BEHAVIOUR_PV - LOGITS_PV.detach())
        errors = [(estimate(level=level, behaviour_PV=near_PV) - exact).norm() / size for level in ("token", "none")]
        assert 0.01 < errors[0] < errors[1] < 10


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "none"])
@pytest.mark.parametrize("loss", ["clipped_surrogate", "cispo", "dppo_tv"])
def test_on_policy_everything_is_the_policy_gradient(loss, level):
    tight = SurrogateConfig(clip_low=0.2, clip_high=0.2, dual_clip=None)
    same_PV = LOGITS_PV.detach()
    found = estimate(loss, level, 2.0, config=tight, behaviour_PV=same_PV, by=("icepop", "geometric", "opsm"))
    close(found, policy_gradient())


def test_on_policy_gspo_is_the_policy_gradient_by_length():
    """Its tokens share one sequence's gradient: Σ_t of three equal losses with 1/3 of it each."""
    close(estimate("gspo", behaviour_PV=LOGITS_PV.detach()), policy_gradient())


def test_gspo_off_policy_is_the_gradient_of_the_root_of_the_ratio():
    """With π_prox = π_b: ∇ E_b[(π_θ / π_b)^(1/3) R] · 3 in place of ∇ E_b[(π_θ / π_b) R], documented as a bias."""
    total = torch.zeros((), dtype=torch.float64)
    for y, reward in zip(SEQUENCES, REWARDS, strict=True):
        behaviour_T = logprobs(BEHAVIOUR_PV, y)
        total = total + behaviour_T.sum().exp() * 3 * (logprobs(LOGITS_PV, y) - behaviour_T).mean().exp() * reward
    root = gradient(total)
    close(estimate("gspo", "geometric", proximal_PV=BEHAVIOUR_PV), root)
    assert far(root, policy_gradient())


@pytest.mark.parametrize("loss", ["clipped_surrogate", "cispo", "dppo_tv"])
def test_ratio_and_weight_multiply_to_one_ratio(loss):
    """With π_prox between π_b and π_θ, u · π_prox/π_b = π_θ/π_b: the same expectation as without a middle policy."""
    middle_PV = 0.5 * (LOGITS_PV.detach() + BEHAVIOUR_PV)
    close(estimate(loss, proximal_PV=middle_PV), token_weighted(lambda r_T: r_T))
    close(estimate(loss), token_weighted(lambda r_T: r_T))


def test_truncation_biases_by_what_it_cuts():
    close(estimate(cap=1.2), token_weighted(lambda r_T: r_T.clamp(max=1.2)))
    assert far(estimate(cap=1.2), estimate())


def test_icepop_biases_by_what_it_leaves_out():
    close(estimate(by=("icepop",)), token_weighted(lambda r_T: r_T * ((r_T >= 0.8) & (r_T <= 1.3))))


def test_opsm_leaves_out_bad_sequences_that_pi_b_liked_better():
    total = torch.zeros((), dtype=torch.float64)
    left_out = 0
    for y, reward in zip(SEQUENCES, REWARDS, strict=True):
        current_T, behaviour_T = logprobs(LOGITS_PV, y), logprobs(BEHAVIOUR_PV, y)
        if reward < 0 and (behaviour_T - current_T).mean() > 0.05:
            left_out += 1
            continue
        ratio = (current_T - behaviour_T).sum().detach().exp()
        total = total + behaviour_T.sum().exp() * ratio * reward * current_T.sum()
    assert 0 < left_out < sum(REWARDS < 0)
    close(estimate(level="sequence", by=("opsm",)), gradient(total))


def test_the_reward_is_not_flat_and_the_policies_differ():
    ratios = [(logprobs(LOGITS_PV, y).sum() - logprobs(BEHAVIOUR_PV, y).sum()).exp().item() for y in SEQUENCES]
    assert max(ratios) > 1.5 and min(ratios) < 0.7 and policy_gradient().norm() > 0.1
