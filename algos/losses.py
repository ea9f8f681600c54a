"""Losses of the ``rl`` and ``ce`` streams: per token, unreduced and unmasked.

Three policies meet in a token: behaviour π_b wrote it, proximal π_prox is the learner at the start of the batch, and current
π_θ is being trained.  Reductions and denominators are ``reductions``'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from slipstream.algos.corrections import MAX_LOG_RATIO, behaviour_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """What a policy loss knows of ``T`` tokens.  Log-probabilities are of the sampled token, at the sampling temperature.

    ``logprobs_T`` are the current policy's, with their graph; ``proximal_T`` the learner's at the start of the batch (on
    the first inner step ``logprobs_T`` itself: it is detached here); ``behaviour_T`` those the engine reported.
    """

    logprobs_T: Float[Tensor, " T"]
    proximal_T: Float[Tensor, " T"]
    behaviour_T: Float[Tensor, " T"]
    advantages_T: Float[Tensor, " T"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateConfig:
    """The keys of the recipe's ``algo`` section that shape the policy loss; see ``core.schema.Algo`` for their ranges."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    behaviour_cap: float | None


PolicyLoss = Callable[[PolicyTerms, SurrogateConfig], Tensor]


def clipped_surrogate(terms: PolicyTerms, config: SurrogateConfig) -> Float[Tensor, " T"]:
    """Decoupled PPO: −w · min(u A, clip(u, 1 − low, 1 + high) A), with u = π_θ / sg(π_prox) and w = sg(min(π_prox / π_b, cap)).

    ``dual_clip`` = c bounds the objective of a negative advantage from below by c A, so a token whose probability has
    risen far cannot dominate the batch.  PPO: Schulman et al. 2017, arXiv 1707.06347; decoupling: Hilton et al. 2021,
    arXiv 2110.00641; asymmetric clip: Yu et al. 2025, arXiv 2503.14476; dual clip: Ye et al. 2020, arXiv 1912.09729.
    """
    ratio_T = _policy_ratio(terms)
    clipped_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective_T = torch.minimum(ratio_T * terms.advantages_T, clipped_T * terms.advantages_T)
    if config.dual_clip is not None:
        floor_T = config.dual_clip * terms.advantages_T
        objective_T = torch.where(terms.advantages_T < 0, torch.maximum(objective_T, floor_T), objective_T)
    weight_T, _ = behaviour_weight(terms.proximal_T, terms.behaviour_T, cap=config.behaviour_cap)
    return -weight_T * objective_T


def clip_fraction(terms: PolicyTerms, config: SurrogateConfig) -> Bool[Tensor, " T"]:
    """Which tokens get no gradient because the clip, or the dual clip, cut it."""
    ratio_T = _policy_ratio(terms).detach()
    rises_T, falls_T = terms.advantages_T > 0, terms.advantages_T < 0
    cut_T = (rises_T & (ratio_T > 1 + config.clip_high)) | (falls_T & (ratio_T < 1 - config.clip_low))
    if config.dual_clip is not None:
        cut_T |= falls_T & (ratio_T > config.dual_clip)
    return cut_T


def token_cross_entropy(logprobs_T: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """The cross-entropy of the given tokens, −log π(y), in nats."""
    return -logprobs_T


def _policy_ratio(terms: PolicyTerms) -> Float[Tensor, " T"]:
    log_ratio_T = terms.logprobs_T - terms.proximal_T.detach()
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


LOSSES: dict[str, PolicyLoss] = {"clipped_surrogate": clipped_surrogate}
