import math

import pytest
import torch

from slipstream.algos.corrections import behaviour_weight, effective_sample_size


def test_truncation_is_from_above_only():
    # ratios 4, 1/8, 1 with a cap of 2
    proximal_T = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    behaviour_T = torch.tensor([-1 - math.log(4), -2 + math.log(8), -3.0], requires_grad=True)
    weight_T, raw_ratio_T = behaviour_weight(proximal_T, behaviour_T, cap=2.0)
    torch.testing.assert_close(weight_T, torch.tensor([2.0, 0.125, 1.0]))
    torch.testing.assert_close(raw_ratio_T, torch.tensor([4.0, 0.125, 1.0]))
    assert not weight_T.requires_grad and not raw_ratio_T.requires_grad


def test_without_a_cap_the_correction_is_off_and_still_measured():
    weight_T, raw_ratio_T = behaviour_weight(torch.zeros(2), torch.tensor([-math.log(3), 0.0]), cap=None)
    assert weight_T.tolist() == [1.0, 1.0]
    torch.testing.assert_close(raw_ratio_T, torch.tensor([3.0, 1.0]))


def test_extreme_ratios_stay_finite():
    # e^20 = 4.851652e8, e^-20 = 2.061154e-9
    weight_T, raw_ratio_T = behaviour_weight(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]), cap=1e12)
    torch.testing.assert_close(weight_T, torch.tensor([4.851652e8, 2.061154e-9]))
    assert torch.equal(weight_T, raw_ratio_T)
    assert effective_sample_size(raw_ratio_T, torch.tensor([True, True])).item() == pytest.approx(0.5)


def test_a_broken_log_probability_is_not_hidden():
    weight_T, _ = behaviour_weight(torch.tensor([math.nan]), torch.zeros(1), cap=2.0)
    assert weight_T.isnan().all()


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
