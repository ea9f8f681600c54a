import pytest

from slipstream.algos.reductions import token_weights

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
