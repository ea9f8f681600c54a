"""Generalised advantage estimation over the tokens of one response, and the loss of the critic that it needs.

GAE is not corrected for off-policy samples: its targets are those of the policy that wrote the tokens.  The behaviour weight
corrects the policy gradient only.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def gae(
    rewards_L: Float[Tensor, " L"],
    values_L: Float[Tensor, " L"],
    action_L: Bool[Tensor, " L"],
    *,
    discount: float,
    trace: float,
) -> tuple[Float[Tensor, " L"], Float[Tensor, " L"]]:
    """``(advantages_L, returns_L)`` of one response: A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} − V_t; returns A + V.

    ``values_L[t]`` is the value of the state before token t; after the last action it is 0, for a response that is cut off,
    too.  Steps are action tokens only, stale ones included: an observation (``action_L`` False) is no step, costs no
    discount, and comes out as 0.  A reward on it counts at the action before it; before the first action it counts nowhere.
    ``discount`` is γ, ``trace`` λ.  Detached.  Schulman et al. 2016, arXiv 1506.02438.

    With γ = λ = 1 the returns are the rewards still to come.  Rewards ``[0, 1]``, values ``[.5, .2]``, γ = 1, λ = .5: δ is
    ``[−.3, .8]``, advantages are ``[.1, .8]``, returns ``[.6, 1]``.
    """
    rewards, values, actions = rewards_L.detach().tolist(), values_L.detach().tolist(), action_L.tolist()
    advantages = [0.0] * len(rewards)
    following, ahead, owed = 0.0, 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if not actions[t]:
            owed += rewards[t]
            continue
        delta = rewards[t] + owed + discount * following - values[t]
        ahead = delta + discount * trace * ahead
        advantages[t], following, owed = ahead, values[t], 0.0
    advantages_L = torch.tensor(advantages, dtype=values_L.dtype, device=values_L.device)
    return advantages_L, torch.where(action_L, advantages_L + values_L.detach(), 0.0)


def value_loss(
    values_T: Float[Tensor, " T"], old_values_T: Float[Tensor, " T"], returns_T: Float[Tensor, " T"], *, clip: float | None
) -> Float[Tensor, " T"]:
    """max((V − R)², (V_clip − R)²) / 2 per token, V_clip = V_old + clip(V − V_old, ±clip); without a ``clip`` (V − R)² / 2.

    The larger of the two holds the critic near its values at the start of the batch, as the clipped surrogate does the
    policy.  Schulman et al. 2017's implementation ("Baselines"); ablated by Huang et al. 2022.
    """
    loss_T = (values_T - returns_T).square()
    if clip is not None:
        clipped_T = old_values_T.detach() + (values_T - old_values_T.detach()).clamp(-clip, clip)
        loss_T = torch.maximum(loss_T, (clipped_T - returns_T).square())
    return loss_T / 2
