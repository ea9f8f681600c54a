"""What needs no learner: how a KL term is weighed, and the clip around the sampler."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.core.algorithms import Algo, Correction
from slipstream.trainer.objective import Objective
from slipstream.trainer.offpolicy import Anchors, OffPolicy
from slipstream.trainer.packing import PackedRow


@pytest.mark.parametrize(("cap", "expected"), [(2.0, [0.5, 1.0, 2.0]), (None, [0.5, 1.0, 9.0])])
def test_a_kl_term_is_weighed_by_the_current_policy_over_the_sampler(cap: float | None, expected: list[float]) -> None:
    """π_θ / π_b of 1/2, 1 and 9, truncated once, whatever becomes of the policy loss (here: no weight at all)."""
    offpolicy = OffPolicy(Algo(correction=Correction(weight="none", cap=cap)))
    behaviour_R = torch.tensor([-1.0, -2.0, -3.0])
    current_R = behaviour_R + torch.tensor([math.log(0.5), 0.0, math.log(9.0)])
    assert offpolicy.kl_weight(current_R, behaviour_R).tolist() == pytest.approx(expected)


def test_the_coupled_arm_clips_around_the_sampler_and_weighs_once() -> None:
    """π_b = 1/2 throughout; π_θ = 0.55, 0.65, 0.65, 0.35, so u = π_θ / π_b = 1.1, 1.3, 1.3, 0.7 with a clip of 0.2.

    Losses −min(u A, clip(u) A) of A = 1, 1, −1, −1: −1.1, −1.2 (clipped), 1.3, 0.8 (clipped); over a denominator of 4.
    Only tokens 0 and 2 have a gradient: ∂/∂log π = −u A / 4.  Decoupled, the same log-probs would give u = 1 and w = u.
    """
    probabilities, behaviour = torch.tensor([0.55, 0.65, 0.65, 0.35]).double(), torch.full((4,), 0.5).double()
    logits_NV = torch.stack([probabilities.log(), (1 - probabilities).log()], dim=-1).requires_grad_()
    zeros = torch.zeros(4, dtype=torch.float64)
    row = PackedRow(
        input_ids_T=torch.zeros(5, dtype=torch.int64),
        position_ids_T=torch.arange(5),
        predicting_N=torch.arange(4),
        targets_N=torch.zeros(4, dtype=torch.int64),
        rl_N=zeros + 1,
        ce_N=zeros,
        distill_N=zeros,
        advantages_N=torch.tensor([1.0, 1.0, -1.0, -1.0]).double(),
        behaviour_N=behaviour.log(),
        lag_N=zeros,
        rewards_N=zeros,
        action_N=torch.ones(4, dtype=torch.bool),
        sequence_N=torch.zeros(4, dtype=torch.int64),
        lengths=(4,),
    )
    coupled = Objective(Algo(proximal="behaviour", correction=Correction(weight="none")), 1.0, 1.0)
    assert not coupled.offpolicy.needs_forward(inner_steps=4)
    share = coupled(
        logits_NV,
        row,
        Anchors(rl_N=row.rl_N),
        rl_denominator=4.0,
        ce_denominator=0.0,
        distill_denominator=0.0,
        progress=0.5,
    )
    share.loss.backward()
    assert share.loss.item() == pytest.approx((-1.1 - 1.2 + 1.3 + 0.8) / 4, rel=1e-5)
    # ∂ log π / ∂ its own logit is 1 − π
    gradient = [-1.1 / 4 * (1 - 0.55), 0.0, 1.3 / 4 * (1 - 0.65), 0.0]
    assert logits_NV.grad is not None and logits_NV.grad[:, 0].tolist() == pytest.approx(gradient, rel=1e-5)
    assert float(share.sums["clipped"]) == 2
    assert float(share.sums["ratio"]) == pytest.approx(1.1 + 1.3 + 1.3 + 0.7), (
        "what the sampler is off by is measured all the same"
    )
    assert float(share.ratio_max) == pytest.approx(1.3) and float(share.sums["truncated"]) == 4.0
