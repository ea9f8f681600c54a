"""Losses of the ``rl`` and ``ce`` streams: per token, unreduced, and without the behaviour weight.

The objective multiplies by ``corrections.behaviour_weight``, once and for every loss; reductions and denominators are
``reductions``'.  With u = π_θ / sg(π_prox) and sg the stop-gradient:

=====================  ====================================================================================================
name                   loss of a token
=====================  ====================================================================================================
``clipped_surrogate``  −min(u A, clip(u, 1 − low, 1 + high) A)
``gspo``               the same of the geometric mean of u over the sequence
``cispo``              −sg(clip(u, 1 − low, 1 + high)) A log π_θ
``dppo_tv``            −u A, without gradient where π_θ has moved from π_b by more than low or high, and A would move it on
=====================  ====================================================================================================

A new loss is a function of this signature and an entry in ``LOSSES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.algos.corrections import MAX_LOG_RATIO
from slipstream.algos.sequences import sequence_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """What a policy loss knows of ``T`` tokens, those of RL weight.  Log-probabilities are of the sampled token, at the
    sampling temperature.

    ``logprobs_T`` are the current policy's, with their graph; ``proximal_T`` the learner's at the start of the batch (on
    the first inner step ``logprobs_T`` itself: it is detached here); ``behaviour_T`` those the engine reported.
    ``sequence_T`` numbers the sequences of the row; all tokens of a sequence are in one row.
    """

    logprobs_T: Float[Tensor, " T"]
    proximal_T: Float[Tensor, " T"]
    behaviour_T: Float[Tensor, " T"]
    advantages_T: Float[Tensor, " T"]
    sequence_T: Int[Tensor, " T"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateConfig:
    """The keys of the recipe's ``algo`` section that shape the policy loss; see ``core.algorithms.Algo`` for their ranges."""

    clip_low: float | None
    clip_high: float
    dual_clip: float | None


class TokenLoss(NamedTuple):
    """``loss_T`` with its graph; ``cut_T`` where a clip or mask leaves a token of advantage ≠ 0 without a gradient."""

    loss_T: Float[Tensor, " T"]
    cut_T: Bool[Tensor, " T"]


PolicyLoss = Callable[[PolicyTerms, SurrogateConfig], TokenLoss]


def clipped_surrogate(terms: PolicyTerms, config: SurrogateConfig) -> TokenLoss:
    """−min(u A, clip(u, 1 − low, 1 + high) A), with u = π_θ / sg(π_prox).

    ``dual_clip`` = c bounds the objective of a negative advantage from below by c A, so a token whose probability has
    risen far cannot dominate the batch.  PPO: Schulman et al. 2017, arXiv 1707.06347; decoupling: Hilton et al. 2021,
    arXiv 2110.00641; asymmetric clip: Yu et al. 2025, arXiv 2503.14476; dual clip: Ye et al. 2020, arXiv 1912.09729.
    """
    return _clipped(_policy_ratio(terms), terms.advantages_T, config)


def gspo(terms: PolicyTerms, config: SurrogateConfig) -> TokenLoss:
    """The clipped surrogate of s = exp(mean over the sequence of log u), the same for each of its tokens.

    Reduced by ``sequence_mean``, value and gradient are those of the sequence objective min(s A, clip(s) A).
    Zheng et al. 2025, arXiv 2507.18071, with clips of 3e-4 and 4e-4.
    """
    log_ratio_T = sequence_mean(terms.logprobs_T - terms.proximal_T.detach(), terms.sequence_T)
    return _clipped(log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), terms.advantages_T, config)


def cispo(terms: PolicyTerms, config: SurrogateConfig) -> TokenLoss:
    """−sg(clip(u, 1 − low, 1 + high)) A log π_θ: the weight is clipped and no token loses its gradient.

    ``clip_low=None`` clips from above only, as the paper does: MiniMax 2025 (MiniMax-M1), arXiv 2506.13585.
    """
    lowest = None if config.clip_low is None else 1 - config.clip_low
    weight_T = _policy_ratio(terms).detach().clamp(lowest, 1 + config.clip_high)
    loss_T = -weight_T * terms.advantages_T * terms.logprobs_T
    return TokenLoss(loss_T, torch.zeros_like(loss_T, dtype=torch.bool))


def dppo_tv(terms: PolicyTerms, config: SurrogateConfig) -> TokenLoss:
    """−u A, masked where the total variation from π_b is beyond the bound and A would widen it.

    The variation is that of the two outcomes "this token" and "another", |π_θ − π_b|; the bound is ``clip_high`` for a token
    that A > 0 has raised, ``clip_low`` for one that A < 0 has lowered.  It is anchored at the behaviour policy, not at the
    proximal one.  Qi et al. 2026 (DPPO, binary TV), arXiv 2602.04879.
    """
    assert config.clip_low is not None, "core.algorithms refuses dppo_tv without a lower bound"
    moved_T = (terms.logprobs_T.exp() - terms.behaviour_T.exp()).detach()
    rises_T, falls_T = terms.advantages_T > 0, terms.advantages_T < 0
    cut_T = (rises_T & (moved_T > config.clip_high)) | (falls_T & (moved_T < -config.clip_low))
    ratio_T = _policy_ratio(terms)
    return TokenLoss(-torch.where(cut_T, ratio_T.detach(), ratio_T) * terms.advantages_T, cut_T)


def token_cross_entropy(logprobs_T: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """The cross-entropy of the given tokens, −log π(y), in nats."""
    return -logprobs_T


def _policy_ratio(terms: PolicyTerms) -> Float[Tensor, " T"]:
    log_ratio_T = terms.logprobs_T - terms.proximal_T.detach()
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(ratio_T: Tensor, advantages_T: Tensor, config: SurrogateConfig) -> TokenLoss:
    assert config.clip_low is not None, "core.algorithms refuses a clipped surrogate without a lower clip"
    low, high = 1 - config.clip_low, 1 + config.clip_high
    rises_T, falls_T = advantages_T > 0, advantages_T < 0
    objective_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(low, high) * advantages_T)
    cut_T = (rises_T & (ratio_T > high)) | (falls_T & (ratio_T < low))
    if config.dual_clip is not None:
        objective_T = torch.where(falls_T, torch.maximum(objective_T, config.dual_clip * advantages_T), objective_T)
        cut_T = cut_T | (falls_T & (ratio_T > config.dual_clip))
    return TokenLoss(-objective_T, cut_T)


LOSSES: dict[str, PolicyLoss] = {
    "clipped_surrogate": clipped_surrogate,
    "gspo": gspo,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
}
