"""What needs no learner: how a term of the proximal policy is brought to the current one."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.core.algorithms import Algo, Correction
from slipstream.trainer.offpolicy import OffPolicy


@pytest.mark.parametrize(("cap", "expected"), [(2.0, [0.5, 1.0, 2.0]), (None, [0.5, 1.0, 3.0])])
def test_the_drift_within_a_batch_is_truncated_like_the_behaviour_weight(cap: float | None, expected: list[float]) -> None:
    """π_θ / π_prox of 1/2, 1 and 3, capped at 2 or not at all."""
    offpolicy = OffPolicy(Algo(correction=Correction(cap=cap)))
    current_R = torch.tensor([math.log(0.5), 0.0, math.log(3.0)])
    assert offpolicy.drift_weight(current_R, torch.zeros(3)).tolist() == pytest.approx(expected)
