"""The lookahead chooses what a calculator would, given enough to go by."""

import random

import pytest

from slipstream.rollout.speculation.lookahead import PROBE_EVERY, Line, Lookahead


def told(most: int, alphas: list[float], base: float, per_token: float, step: float, batch: int = 2) -> Lookahead:
    """A chooser after 2,000 rounds of every γ, at these chances and times without noise."""
    chooser, dice = Lookahead(most), random.Random(0)
    for done in range(2000):
        gamma = done % (most + 1)
        for _ in range(batch):
            accepted = 0
            while accepted < gamma and dice.random() < alphas[accepted]:
                accepted += 1
            chooser.judged(gamma, accepted)
        chooser.took(batch * (1 + gamma), base + per_token * batch * (1 + gamma), batch * gamma, step * batch * gamma)
    return chooser


def test_a_line_through_points() -> None:
    line = Line()
    assert line.at(5.0) == 0.0
    line.add(3.0, 10.0)
    assert line.at(5.0) == 10.0, "one point has no slope"
    for x in (1.0, 2.0, 4.0, 7.0) * 3:
        line.add(x, 4.0 + 2.0 * x)
    assert line.at(10.0) == pytest.approx(24.0)
    down = Line()
    for x in (1.0, 2.0, 3.0):
        down.add(x, 9.0 - x)
    assert down.at(10.0) == pytest.approx(7.0, abs=0.01), "more work does not take less time: the mean instead"


def test_expected_tokens() -> None:
    """α = (1/2, 1/4): 1 + 1/2 + 1/8 = 1.625, and half of 1/sqrt(200) = 0.0354 on each of them: 1 + 0.5354 + 0.1528 = 1.6882."""
    chooser = Lookahead(2)
    chooser.alphas, chooser._seen = [0.5, 0.25], [1000, 1000]
    assert chooser.expected(0) == 1.0
    assert chooser.expected(2) == pytest.approx(1.6882, abs=1e-4)


def test_the_best_of_all() -> None:
    """Target 1 s + 0.1 s a token, draft 0.1 s a token, two requests, α = 0.8 each: γ = 3.

    Seconds for γ = 0..5: 1.2, 1.6, 2.0, 2.4, 2.8, 3.2; E = 1, 1.8, 2.44, 2.952, 3.3616, 3.68928.
    Rates 0.833, 1.125, 1.22, 1.23, 1.2006, 1.1529.
    """
    assert told(5, [0.8] * 5, 1.0, 0.1, 0.1).best(2) == 3


def test_off_where_it_does_not_pay_and_deep_where_it_is_free() -> None:
    """Only tokens cost: γ = 1 takes twice the time for 1.5 times the tokens.  Only the round costs: all of them."""
    assert told(4, [0.5] * 4, 0.0, 1.0, 0.1).best(2) == 0
    assert told(4, [0.5] * 4, 1.0, 0.0, 0.0).best(2) == 4


def test_it_depends_on_the_number_of_requests() -> None:
    """1 s a round and 0.02 s a token: one request drafts deep, a hundred none."""
    chooser = told(4, [0.6] * 4, 1.0, 0.02, 0.001)
    assert chooser.best(1) == 4 and chooser.best(400) <= 1


def test_it_begins_with_everything_and_then_probes() -> None:
    chooser = Lookahead(3)
    assert [chooser.choose(2) for _ in range(4)] == [3, 2, 1, 0]
    chooser = told(3, [0.6] * 3, 1.0, 0.1, 0.05)
    best = chooser.best(2)
    chosen = [chooser.choose(2) for _ in range(8 * PROBE_EVERY)]
    probes = [gamma for gamma in chosen[4:] if gamma != best]
    assert 0 < len(probes) <= 8 and set(probes) == {best - 1, best + 1}, "up and down in turn"
