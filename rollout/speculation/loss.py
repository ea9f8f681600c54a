"""What a draft learns from the target's verdicts."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.distill.divergences import forward_kl


def draft_loss(
    now_RV: Float[Tensor, "R V"],
    target_RV: Float[Tensor, "R V"],
    proposed_RV: Float[Tensor, "R V"] | None,
    weights_R: Float[Tensor, " R"],
    proximal: float,
) -> Float[Tensor, ""]:
    """Σ_r w_r [KL(p_r ‖ q′_r) + λ KL(q_r ‖ q′_r)] / Σ_r w_r in nats, over R draft positions of any rounds and requests.

    Logits, already divided by the temperature: of the draft now (q′, which alone gets a gradient), of the target (p), and of
    the draft when it proposed (q); the last may be None where λ = ``proximal`` is 0.  Where q′ = q the λ term has no gradient,
    so it holds back only updates that come late, or the second of several.
    """
    kl_R = forward_kl(now_RV, target_RV)
    if proximal:
        assert proposed_RV is not None
        kl_R = kl_R + proximal * forward_kl(now_RV, proposed_RV)
    return (weights_R * kl_R).sum() / weights_R.sum()


def position_weights(ks: Tensor, decay: float) -> Tensor:
    """w = exp(−(k − 1) / decay) of draft positions k counted from 1: 1, e^(−1/4), e^(−2/4), … for a decay of 4."""
    return torch.exp(-(ks.float() - 1) / decay)
