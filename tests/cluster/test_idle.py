"""A run in which nothing is learnt any more ends, in one line that says why."""

from __future__ import annotations

import pytest

from slipstream.cluster.idle import IdleGroups
from slipstream.rollout.failures import GroupFailed

BROKEN = GroupFailed("mine:f/raised", "KeyError: 'answer'\n  in mine.py")


def test_groups_that_all_failed_are_said_to_have_failed() -> None:
    idle = IdleGroups(3)
    idle.failed(BROKEN)
    idle.failed(BROKEN)
    with pytest.raises(RuntimeError) as ended:
        idle.failed(BROKEN)
    told = str(ended.value)
    assert told.startswith("all 3 groups failed: mine:f/raised: KeyError: 'answer' in mine.py (schedule.max_idle_groups). Mend")
    assert "\n" not in told and "no learning signal" not in told


def test_failed_and_equal_groups_are_counted_apart() -> None:
    idle = IdleGroups(3)
    idle.failed(BROKEN)
    idle.failed(BROKEN)
    with pytest.raises(
        RuntimeError, match=r"from the last 3 groups .*, 2 of them failed; the last one had equal rewards, 0\.5"
    ):
        idle.equal(0.5)


def test_a_signal_starts_the_count_again() -> None:
    idle = IdleGroups(2)
    idle.equal(0.0)
    idle.signal()
    idle.failed(BROKEN)
    with pytest.raises(RuntimeError, match="no learning signal from the last 2 groups"):
        idle.equal(1.0)


def test_data_that_ends_without_a_signal_is_a_failure() -> None:
    """Fewer tasks than the limit; with nothing dispatched, or after a signal, there is nothing to say."""
    idle = IdleGroups(400)
    idle.ended()
    idle.equal(0.0)
    idle.failed(BROKEN)
    with pytest.raises(
        RuntimeError, match=r"last 2 groups \(and the data has ended\), 1 of them failed; the last one failed: mine"
    ):
        idle.ended()
    idle.signal()
    idle.ended()
