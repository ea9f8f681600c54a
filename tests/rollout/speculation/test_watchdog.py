"""When the kill switch rings, and when not."""

import random

import pytest

from slipstream.rollout.speculation.watchdog import Watchdog


def test_the_watchdog_rings_for_a_fall_and_not_for_chance() -> None:
    """Baseline 2.0 of variance 1 over 100; 3 · sqrt(1.5 / 100) = 0.367, so the alarm is below 0.95 · 2 − 0.367 = 1.533.

    At a steady 1.0 the average is 1 + 0.99^n: 1.534 after 62 drafts, 1.528 after 63.
    """
    watchdog = Watchdog(horizon=100, below=0.95)
    for _ in range(50):
        watchdog.count([1])
        watchdog.count([3])
    assert (watchdog.resting, watchdog.baseline, watchdog.average, watchdog.variance) == (False, 2.0, 2.0, 1.0)
    for _ in range(62):
        watchdog.count([1])
    assert not watchdog.rings and not watchdog.content
    watchdog.count([1])
    assert watchdog.rings
    watchdog.restart()
    assert not watchdog.rings and watchdog.resting
    for tokens in [1, 3, 2, 2] * 25:
        assert watchdog.resting, "the restored draft is measured at rest"
        watchdog.count([tokens])
    assert not watchdog.resting and (watchdog.baseline, watchdog.average) == (2.0, 2.0)


def test_a_new_policy_may_only_lower_the_baseline() -> None:
    watchdog = Watchdog(horizon=10, below=0.95)
    for tokens in [2] * 10:
        watchdog.count([tokens])
    watchdog.new_policy()
    for tokens in [1.8, 2] * 5:
        assert not watchdog.rings, "no alarm while the policy's new baseline is being measured"
        watchdog.count([tokens])
    assert watchdog.baseline == pytest.approx(1.9)
    watchdog.new_policy()
    for tokens in [3] * 10:
        watchdog.count([tokens])
    assert watchdog.baseline == pytest.approx(1.9) and watchdog.content


def test_a_policy_that_costs_more_than_a_tenth_is_not_believed_at_once() -> None:
    """2.0, then 1.0 from a new policy on: the baseline falls to 1.8, it rings, and the draft at rest falls as far."""
    watchdog = Watchdog(horizon=10, below=0.95)
    for tokens in [2] * 10:
        watchdog.count([tokens])
    watchdog.new_policy()
    for _ in range(60):
        watchdog.count([1] * 8)
    assert watchdog.baseline == 1.8 and watchdog.rings
    watchdog.restart()
    for _ in range(10):
        watchdog.count([1] * 8)
    assert watchdog.baseline == 1.0 and not watchdog.rings and watchdog.content


def test_a_slow_decline_over_many_policies_is_noticed() -> None:
    """3 % lost under every policy and none at its arrival: 2.0, 1.94, 1.88, … ; the alarm comes below 0.95 · 2.0 = 1.9."""
    watchdog = Watchdog(horizon=10, below=0.95)
    lengths = []
    for policy in range(4):
        for share in (1.0, 0.97):
            for _ in range(60):
                watchdog.count([2.0 * 0.97**policy * share])
        lengths.append((round(watchdog.average, 2), watchdog.rings))
        watchdog.new_policy()
    assert lengths == [(1.94, False), (1.88, True), (1.83, True), (1.77, True)]


def test_policies_that_come_faster_than_a_baseline_do_not_hide_a_fall() -> None:
    """A new policy every 6 rounds, a baseline of 10: 2.0 at first, then 1.0 all of a sudden, in the midst of a policy."""
    watchdog = Watchdog(horizon=10, below=0.95)
    rang = False
    for turn in range(120):
        if turn % 6 == 0 and turn:
            watchdog.new_policy()
        watchdog.count([2.0 if turn < 63 else 1.0] * 8)
        rang |= watchdog.rings
        assert not (rang and turn < 63)
    assert rang


def test_rounds_of_many_requests_make_a_watchdog_sharp() -> None:
    """20 rounds of 16 drafts: 320 lengths of mean 2.2 and variance 1.5, so 3 standard errors are 0.25; a fall to 1.6 is seen,
    and nothing rings where nothing has changed."""
    generator = random.Random(0)
    watchdog = Watchdog(horizon=20, below=0.95)

    def rounds(accepted: float, count: int) -> bool:
        for _ in range(count):
            drafts = [next(k for k in range(4) if k == 3 or generator.random() > accepted) + 1 for _ in range(16)]
            watchdog.count(drafts)
            if watchdog.rings:
                return True
        return False

    assert not rounds(0.6, 400)
    assert watchdog.drafts == 320
    assert rounds(0.4, 40)


@pytest.mark.parametrize("accepted", [0.6, 0.9, 0.95, 0.98])
def test_a_draft_that_never_changes_rings_seldom(accepted: float) -> None:
    """One request, 20 drafts in the baseline, 20 seeds of 2,000 rounds each: a lucky baseline is found out, not rung for."""
    alarms = []
    for seed in range(20):
        generator = random.Random(seed)
        watchdog = Watchdog(horizon=20, below=0.95)
        alarms.append(0)
        for _ in range(2000):
            watchdog.count([next(k for k in range(4) if k == 3 or generator.random() > accepted) + 1])
            if watchdog.rings:
                alarms[-1] += 1
                watchdog.restart()
    assert max(alarms) <= 2 and sum(alarms) <= 10, alarms
