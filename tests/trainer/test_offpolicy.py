"""What needs no learner: how a KL term is weighed."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.core.algorithms import Algo, Correction
from slipstream.trainer.offpolicy import OffPolicy


@pytest.mark.parametrize(("cap", "expected"), [(2.0, [0.5, 1.0, 2.0]), (None, [0.5, 1.0, 9.0])])
def test_a_kl_term_is_weighed_by_the_current_policy_over_the_sampler(cap: float | None, expected: list[float]) -> None:
    """π_θ / π_b of 1/2, 1 and 9, truncated once, whatever becomes of the policy loss (here: no weight at all)."""
    offpolicy = OffPolicy(Algo(correction=Correction(weight="none", cap=cap)))
    behaviour_R = torch.tensor([-1.0, -2.0, -3.0])
    current_R = behaviour_R + torch.tensor([math.log(0.5), 0.0, math.log(9.0)])
    assert offpolicy.kl_weight(current_R, behaviour_R).tolist() == pytest.approx(expected)
