import pytest
import torch

from slipstream.algos.reductions import reduce_to_kept, token_weights

MASKS = [[True, True, False, True], [False, True], [False, False, False]]
LOSSES = [[1.0, 2.0, 100.0, 3.0], [100.0, 6.0], [100.0, 100.0, 100.0]]


def reduce(mode, masks=MASKS, losses=LOSSES, max_tokens=5):
    weights, denominator = token_weights(mode, masks, max_tokens=max_tokens)
    rows = zip(weights, losses, strict=True)
    return sum(w * loss for row_w, row_l in rows for w, loss in zip(row_w, row_l, strict=True)) / denominator


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 12 / 4),  # 1 + 2 + 3 + 6 over four tokens
        ("sequence_mean", (2 + 6) / 2),  # means 2 and 6; the fully masked sequence is not one of the two
        ("constant", 12 / (3 * 5)),  # three sequences of at most five tokens
    ],
)
def test_literal_means(mode, expected):
    assert reduce(mode) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "weights", "denominator"),
    [
        ("token_mean", [[1, 1, 0, 1], [0, 1], [0, 0, 0]], 4.0),
        ("sequence_mean", [[1 / 3, 1 / 3, 0, 1 / 3], [0, 1], [0, 0, 0]], 2.0),
        ("constant", [[1, 1, 0, 1], [0, 1], [0, 0, 0]], 15.0),
    ],
)
def test_literal_weights(mode, weights, denominator):
    found = token_weights(mode, MASKS, max_tokens=5)
    assert found == (weights, denominator)
    assert isinstance(found[1], float)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
def test_a_mean_of_ones_is_one(mode):
    assert reduce(mode, losses=[[1.0] * len(mask) for mask in MASKS]) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("masks", [[], [[]], [[False, False], []]])
def test_nothing_left(mode, masks):
    assert token_weights(mode, masks, max_tokens=5) == ([[0.0] * len(mask) for mask in masks], 0.0)


def test_refused_arguments():
    with pytest.raises(ValueError, match="reduction: got 'mean', expected 'token_mean'"):
        token_weights("mean", MASKS, max_tokens=5)
    with pytest.raises(ValueError, match="max_tokens: got 0"):
        token_weights("constant", MASKS, max_tokens=0)


ROW = torch.tensor([0, 0, 0, 2, 2])
KEPT = torch.tensor([True, False, True, False, False])


@pytest.mark.parametrize(
    ("mode", "before", "after", "share"),
    [
        ("token_mean", [1.0, 0.5, 0.25, 1.0, 1.0], [1.0, 0.0, 0.25, 0.0, 0.0], 2.0),  # two tokens are kept
        # thirds of the first sequence become halves (and keep their decay of 1/2); the second leaves
        ("sequence_mean", [1 / 3, 1 / 3, 1 / 6, 1 / 2, 1 / 2], [1 / 2, 0.0, 1 / 4, 0.0, 0.0], 1.0),
        ("constant", [1.0, 0.5, 0.25, 1.0, 1.0], [1.0, 0.0, 0.25, 0.0, 0.0], 0.0),
    ],
)
def test_rejected_tokens_leave_the_denominator(mode, before, after, share):
    weights_T, found = reduce_to_kept(mode, torch.tensor(before), KEPT, ROW)
    torch.testing.assert_close(weights_T, torch.tensor(after))
    assert found.item() == share


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
def test_a_mean_of_ones_is_one_after_rejection_too(mode):
    masks = [[True] * 3, [True] * 2]
    weights, _ = token_weights(mode, masks, max_tokens=5)
    flat = torch.tensor([w for row in weights for w in row])
    weights_T, share = reduce_to_kept(mode, flat, torch.tensor([True, False, True, False, True]), ROW)
    assert (weights_T.sum() / share).item() == pytest.approx(1.0)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant"])
def test_keeping_all_changes_nothing(mode):
    weights, denominator = token_weights(mode, [[True] * 3, [True] * 2], max_tokens=5)
    flat = torch.tensor([w for row in weights for w in row])
    weights_T, share = reduce_to_kept(mode, flat, torch.ones(5).bool(), ROW)
    assert torch.equal(weights_T, flat) and (mode == "constant" or share.item() == pytest.approx(denominator))
