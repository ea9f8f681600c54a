"""Corrections for samples that another policy wrote than the one being trained."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before ``exp``: a ratio of 4.9e8 is as absurd as infinity, but it stays a number."""


def behaviour_weight(
    proximal_T: Float[Tensor, " T"], behaviour_T: Float[Tensor, " T"], *, cap: float | None
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """``(weight_T, raw_ratio_T)``: the truncated importance weight min(π_prox / π_b, cap), and the ratio before truncation.

    Both log-probabilities are of the sampled token: ``proximal_T`` under the learner at the start of the batch,
    ``behaviour_T`` as the engine reported it.  Truncation from above bounds the variance and biases towards the behaviour
    policy.  Both results are detached.  With ``cap=None`` the correction is off: the weights are ones, and the ratio is
    still there to be measured.  Decoupled PPO: Hilton et al. 2021, arXiv 2110.00641.
    """
    log_ratio_T = (proximal_T - behaviour_T).detach()
    raw_ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight_T = torch.ones_like(raw_ratio_T) if cap is None else raw_ratio_T.clamp(max=cap)
    return weight_T, raw_ratio_T


def effective_sample_size(raw_ratio_T: Float[Tensor, " T"], mask_T: Bool[Tensor, " T"]) -> Float[Tensor, ""]:
    """Kish's effective sample size of the masked tokens as a fraction of their number: (Σr)² / (n Σr²), in (0, 1].

    1 where every ratio is the same, 1/n where one token outweighs all others.  ``[1, 1, 2, 4]`` gives 64 / (4 · 22).
    An empty mask gives 1: nothing was lost.  Fractions of two parts do not average to that of the whole.
    """
    ratio_N = raw_ratio_T[mask_T].double()
    if len(ratio_N) == 0:
        return ratio_N.new_ones(())
    return (ratio_N.sum().square() / (len(ratio_N) * ratio_N.square().sum())).clamp(max=1.0)
