"""Dynamic lookahead against rounds whose cost and acceptance are known."""

from __future__ import annotations

from random import Random

import pytest

from slipstream.rollout.speculation.lookahead import Lookahead

MOST = 6


def accepted(random: Random, alpha: float, drafted: int) -> int:
    held = 0
    while held < drafted and random.random() < alpha:
        held += 1
    return held


def cost(drafted: int, batch: int, draft_cost: float, row_cost: float) -> float:
    """One target step, more for each row that it verifies, and the draft's own steps."""
    return 1.0 + row_cost * batch * (drafted + 1) + draft_cost * drafted


def rate(length: int, alpha: float, batch: int, draft_cost: float, row_cost: float) -> float:
    """Tokens per second of a fixed length, exactly: Σ_{k ≤ γ} α^k over the cost."""
    return batch * sum(alpha**k for k in range(length + 1)) / cost(length, batch, draft_cost, row_cost)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.6, 0.85])
@pytest.mark.parametrize(("batch", "row_cost"), [(1, 0.01), (8, 0.03), (32, 0.2)])
def test_it_is_within_three_percent_of_the_best_fixed_length(alpha: float, batch: int, row_cost: float) -> None:
    random, lookahead = Random(0), Lookahead(MOST)
    rates = [rate(n, alpha, batch, 0.1, row_cost) for n in range(MOST + 1)]
    tokens = seconds = 0.0
    for number in range(3000):
        drafted = lookahead.choose(batch)
        held = [accepted(random, alpha, drafted) for _ in range(batch)]
        took = cost(drafted, batch, 0.1, row_cost)
        lookahead.observe(batch, drafted, held, took * random.uniform(0.9, 1.1))
        if number >= 100:  # after it has looked round
            tokens, seconds = tokens + sum(held) + batch, seconds + took
    assert tokens / seconds >= 0.97 * max(rates)
    assert tokens / seconds > min(rates)


def test_it_follows_an_acceptance_that_changes() -> None:
    random, lookahead = Random(1), Lookahead(MOST)
    lengths = {}
    for alpha in (0.1, 0.9, 0.1):
        for _ in range(600):
            drafted = lookahead.choose(4)
            held = [accepted(random, alpha, drafted) for _ in range(4)]
            lookahead.observe(4, drafted, held, cost(drafted, 4, 0.15, 0.01))
        lengths.setdefault(alpha, []).append(sorted(lookahead.choose(4) for _ in range(9))[4])
    assert lengths[0.9] == [MOST]
    assert max(lengths[0.1]) <= 1


def test_batch_sizes_are_judged_apart() -> None:
    """Rows that cost nothing at batch 1 and a step each at batch 64."""
    random, lookahead = Random(2), Lookahead(4)
    for _ in range(300):
        for batch, row_cost in ((1, 0.0), (64, 1.0)):
            drafted = lookahead.choose(batch)
            held = [accepted(random, 0.6, drafted) for _ in range(batch)]
            lookahead.observe(batch, drafted, held, cost(drafted, batch, 0.05, row_cost))
    assert sorted(lookahead.choose(1) for _ in range(9))[4] >= 3
    assert sorted(lookahead.choose(64) for _ in range(9))[4] == 0


def test_expected_tokens_are_the_survival_sum() -> None:
    """α = 3/4 then 1/2, each from many rounds: 1 + 3/4 + 3/8."""
    lookahead = Lookahead(2)
    for _ in range(400):
        lookahead.observe(8, 2, [0, 0, 1, 1, 1, 2, 2, 2], 1.0)
    assert lookahead.tokens() == pytest.approx([1.0, 1.75, 2.125], abs=0.01)


def test_a_lookahead_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="most: got 0, expected at least 1"):
        Lookahead(0)
