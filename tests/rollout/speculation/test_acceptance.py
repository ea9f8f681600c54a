"""Counters of verdicts, and what is told of them."""

import pytest

from slipstream.core.metrics import values
from slipstream.rollout.speculation.acceptance import Acceptance


def test_acceptance_by_hand() -> None:
    """Ten rounds of K = 2: five with 0 accepted, three with 1, two with 2; the first was taken in 5 of 10, both in 2."""
    start = Acceptance((1, 0, 0), 2, (1, 0, 0, 0), (0, 0, 0, 0))
    now = start.plus(Acceptance((5, 3, 2), 20, (4, 3, 2, 1), (2, 2, 2, 1)))
    assert values(now.minus(start).metrics()) == {
        "draft/rounds": 10,
        "draft/accepted": 7,
        "draft/tokens": 2.0,
        "draft/acceptance_length": pytest.approx(1.7),
        "draft/acceptance_pos_1": pytest.approx(0.5),
        "draft/acceptance_pos_2": pytest.approx(0.2),
        "draft/acceptance_length_q1": pytest.approx(1.5),
        "draft/acceptance_length_q2": pytest.approx(1 + 2 / 3),
        "draft/acceptance_length_q3": pytest.approx(2.0),
        "draft/acceptance_length_q4": pytest.approx(2.0),
    }
    assert values(start.minus(start).metrics()) == {"draft/rounds": 0, "draft/accepted": 0}
