import math

import pytest
import torch

from slipstream.algos.corrections import (
    REJECTIONS,
    Bands,
    behaviour_ratio,
    behaviour_weight,
    effective_sample_size,
    loglinear_proximal,
    rejected,
)
from slipstream.algos.losses import LOSSES, PolicyTerms, SurrogateConfig
from slipstream.algos.sequences import sequence_mean, sequence_sum

BANDS = Bands(icepop=(0.5, 5.0), geometric=(0.8, 1.25), opsm_delta=0.1)
ALONE = torch.arange(3)


def logs(*ratios, dtype=torch.float64):
    return torch.tensor(ratios, dtype=dtype).log()


def test_sums_and_means_of_sequences():
    # sequences 0 (tokens 0, 1, 4) and 2 (tokens 2, 3); number 1 is missing
    values_T, sequence_T = torch.tensor([1.0, 2.0, 5.0, 7.0, 6.0]), torch.tensor([0, 0, 2, 2, 0])
    assert sequence_sum(values_T, sequence_T).tolist() == [9.0, 9.0, 12.0, 12.0, 9.0]
    assert sequence_mean(values_T, sequence_T).tolist() == [3.0, 3.0, 6.0, 6.0, 3.0]
    assert sequence_mean(values_T[:0], sequence_T[:0]).tolist() == []


@pytest.mark.parametrize(
    ("level", "ratio", "weight"),  # tokens 4, 1/8 | 3, 3; cap 2
    [
        ("token", [4.0, 0.125, 3.0, 3.0], [2.0, 0.125, 2.0, 2.0]),
        ("sequence", [0.5, 0.5, 9.0, 9.0], [0.5, 0.5, 2.0, 2.0]),
        ("geometric", [math.sqrt(0.5)] * 2 + [3.0] * 2, [math.sqrt(0.5)] * 2 + [2.0] * 2),
        ("none", [4.0, 0.125, 3.0, 3.0], [1.0] * 4),
    ],
)
def test_levels_and_truncation_from_above(level, ratio, weight):
    behaviour_T = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64, requires_grad=True)
    proximal_T = (behaviour_T.detach() + logs(4, 0.125, 3, 3)).requires_grad_()
    ratio_T = behaviour_ratio(proximal_T, behaviour_T, torch.tensor([0, 0, 1, 1]), level)
    assert ratio_T.tolist() == pytest.approx(ratio)
    weight_T = behaviour_weight(ratio_T, level=level, cap=2.0)
    assert weight_T.tolist() == pytest.approx(weight)
    assert not weight_T.requires_grad and not ratio_T.requires_grad
    assert behaviour_weight(ratio_T, level=level, cap=None).tolist() == pytest.approx([1.0] * 4 if level == "none" else ratio)


def test_extreme_ratios_stay_finite():
    # e^20 = 4.851652e8, e^-20 = 2.061154e-9
    extremes = torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0])
    ratio_T = behaviour_ratio(*extremes, ALONE[:2], "token")
    torch.testing.assert_close(ratio_T, torch.tensor([4.851652e8, 2.061154e-9]))
    assert effective_sample_size(ratio_T, torch.tensor([True, True])).item() == pytest.approx(0.5)
    assert behaviour_ratio(*extremes, torch.zeros(2, dtype=torch.int64), "sequence").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_broken_log_probability_is_not_hidden(level):
    broken_T = torch.tensor([math.nan, -1.0])
    ratio_T = behaviour_ratio(broken_T, torch.zeros(2), ALONE[:2], level)
    assert behaviour_weight(ratio_T, level=level, cap=2.0)[0].isnan()
    assert not rejected(broken_T, torch.zeros(2), -torch.ones(2), ALONE[:2], by=list(REJECTIONS), bands=BANDS)[0]


def reject(ratios, advantages, sequences, *by):
    found = rejected(
        logs(*ratios),
        torch.zeros(len(ratios), dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(sequences),
        by=by,
        bands=BANDS,
    )
    return found.tolist()


def test_icepop_rejects_tokens_outside_the_band():
    assert reject([0.4, 0.6, 1.0, 4.9, 5.1, 1e30], [1.0] * 6, [0] * 6, "icepop") == [True, False, False, False, True, True]


def test_the_geometric_band_rejects_sequences():
    # geometric means: sqrt(4 * 0.25) = 1; sqrt(2 * 1) = 1.41 > 1.25; sqrt(0.9 * 0.5) = 0.67 < 0.8
    found = reject([4.0, 0.25, 2.0, 1.0, 0.9, 0.5], [1.0] * 6, [0, 0, 1, 1, 2, 2], "geometric")
    assert found == [False, False, True, True, True, True]


def test_opsm_rejects_what_has_become_unlikely_and_was_bad():
    # mean log(π_b / π_prox): ln 2 / 2 = 0.35 > 0.1 (A < 0: out; A > 0: stays); -0.35; 0.05 < 0.1
    found = reject([0.5, 1.0, 0.5, 1.0, 2.0, 1.0, math.exp(-0.05)], [-1, -1, 1, 1, -1, -1, -1], [0, 0, 1, 1, 2, 2, 3], "opsm")
    assert found == [True, True, False, False, False, False, False]


def test_rejections_add_up_and_none_rejects_nothing():
    ratios, advantages, sequences = [6.0, 0.5, 1.0], [1.0, -1.0, -1.0], [0, 1, 2]
    assert reject(ratios, advantages, sequences, "icepop", "opsm") == [True, True, False]
    assert reject(ratios, advantages, sequences) == [False, False, False]


def test_loglinear_proximal_by_hand():
    """π_b = 1/2 and π_θ = 1/4 at half the batch: α = 0 at lag 0 gives 1/2; α = 1 / 1.5 = 2/3 at lag 1 gives 2^(−1 − 2/3);
    α = 2 / 2.5 = 0.8 at lag 2 gives 2^(−1.8)."""
    current_T = logs(0.25, 0.25, 0.25).requires_grad_()
    behaviour_T, lag_T = logs(0.5, 0.5, 0.5), torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    found_T = loglinear_proximal(current_T, behaviour_T, lag_T, 0.5)
    assert found_T.exp().tolist() == pytest.approx([0.5, 2 ** (-1 - 2 / 3), 2**-1.8]) and not found_T.requires_grad
    start_T = loglinear_proximal(current_T, behaviour_T, lag_T, 0.0)
    assert start_T.exp().tolist() == pytest.approx([0.5, 0.25, 0.25]), "before the first step the learner is the current policy"


@pytest.mark.parametrize(
    ("ratios", "mask", "expected"),
    [
        ([1.0, 1.0, 2.0, 4.0], [1, 1, 1, 1], 64 / 88),  # 8^2 / (4 * (1 + 1 + 4 + 16))
        ([1.0, 1.0, 2.0, 4.0], [0, 0, 1, 1], 36 / 40),  # 6^2 / (2 * (4 + 16))
        ([3.0, 3.0, 3.0], [1, 1, 1], 1.0),
        ([1e8, 1e-8, 1e-8], [1, 1, 1], 1 / 3),  # one token is everything
        ([5.0, 7.0], [0, 0], 1.0),  # nothing there, nothing lost
    ],
)
def test_effective_sample_size(ratios, mask, expected):
    found = effective_sample_size(torch.tensor(ratios), torch.tensor(mask).bool())
    assert found.item() == pytest.approx(expected, rel=1e-6) and found <= 1


@pytest.mark.parametrize("proximal", ["first step", "loglinear"])
@pytest.mark.parametrize("level", ["none", "token", "sequence", "geometric"])
@pytest.mark.parametrize("loss", ["clipped_surrogate", "gspo", "dppo_tv"])
def test_a_corrected_loss_against_finite_differences_with_the_correction_frozen(loss, level, proximal):
    """d Σ w · loss(u) / d log π, where w and π_prox are made from the same log π and yet stand still: both are detached.

    Two sequences, one of each sign; the ratios are inside clip and mask, and r = 3 of the first token is cut at 2.
    """
    base_T = logs(0.3, 0.2, 0.25, 0.5).requires_grad_()
    behaviour_T = logs(0.1, 0.15, 0.24, 0.4)
    sequence_T, lag_T = torch.tensor([0, 0, 1, 1]), torch.tensor([0.0, 1.0, 2.0, 1.0], dtype=torch.float64)
    config = SurrogateConfig(clip_low=0.9, clip_high=9.0, dual_clip=None)

    def fixed(logprobs_T):
        """log π_prox and weight, from the current log-probabilities."""
        proximal_T = logprobs_T if proximal == "first step" else loglinear_proximal(logprobs_T, behaviour_T, lag_T, 0.5)
        ratio_T = behaviour_ratio(proximal_T, behaviour_T, sequence_T, level)
        return proximal_T, behaviour_weight(ratio_T, level=level, cap=2.0)

    def objective(logprobs_T, proximal_T, weight_T):
        advantages_T = torch.tensor([1.3, 1.3, -0.7, -0.7], dtype=torch.float64)
        terms = PolicyTerms(
            logprobs_T=logprobs_T,
            proximal_T=proximal_T,
            behaviour_T=behaviour_T,
            advantages_T=advantages_T,
            sequence_T=sequence_T,
        )
        return (weight_T * LOSSES[loss](terms, config).loss_T).sum()

    (found_T,) = torch.autograd.grad(objective(base_T, *fixed(base_T)), base_T)
    frozen = [x_T.detach() for x_T in fixed(base_T)]
    step = 1e-6
    for t, slope in enumerate(found_T.tolist()):
        there, back = (base_T.detach() + h * torch.eye(4, dtype=torch.float64)[t] for h in (step, -step))
        difference = (objective(there, *frozen) - objective(back, *frozen)) / (2 * step)
        assert slope == pytest.approx(difference.item(), rel=1e-7) and slope != 0
