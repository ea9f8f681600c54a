"""Corrections for samples that another policy wrote than the one being trained.

Three policies meet in a token: behaviour π_b wrote it, proximal π_prox is the learner at the start of the batch, and current
π_θ is being trained.  ``behaviour_weight`` weighs by π_prox / π_b, ``rejected`` leaves tokens out by it, and
``loglinear_proximal`` stands in for π_prox without a forward pass.  Nothing here carries a gradient; the objective applies
each once.

Sequence-wise quantities are over the tokens that are given, which are those of RL weight: a stale token is in no ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.algos.sequences import sequence_mean, sequence_sum

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before ``exp``: a ratio of 4.9e8 is as absurd as infinity, but it stays a number."""

Level = Literal["none", "token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """Where the rejections cut; see ``core.algorithms.Correction`` for defaults and ranges."""

    icepop: tuple[float, float]
    geometric: tuple[float, float]
    opsm_delta: float


def behaviour_ratio(
    proximal_T: Float[Tensor, " T"], behaviour_T: Float[Tensor, " T"], sequence_T: Int[Tensor, " T"], level: Level
) -> Float[Tensor, " T"]:
    """r = π_prox / π_b per token, before truncation, detached.

    Both log-probabilities are of the sampled token: ``proximal_T`` under the learner at the start of the batch,
    ``behaviour_T`` as the engine reported it.

    - ``token`` (and ``none``, to be measured): the token's own.
    - ``sequence``: the product over the sequence, given to each of its tokens; unbiased, of large variance.
    - ``geometric``: the geometric mean over the sequence, given to each of its tokens.
    """
    log_ratio_T = (proximal_T - behaviour_T).detach()
    if level == "sequence":
        log_ratio_T = sequence_sum(log_ratio_T, sequence_T)
    elif level == "geometric":
        log_ratio_T = sequence_mean(log_ratio_T, sequence_T)
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def behaviour_weight(ratio_T: Float[Tensor, " T"], *, level: Level, cap: float | None) -> Float[Tensor, " T"]:
    """min(ratio, cap) of a ``behaviour_ratio``; ones where ``level`` is ``none``.

    Truncation from above bounds the variance and biases towards the behaviour policy; ``cap=None`` leaves it out.  Decoupled
    PPO: Hilton et al. 2021, arXiv 2110.00641; truncation: Ionides 2008, and per token Yao et al. 2025 ("TIS").
    A ratio per token leaves out that the prefix, too, came from π_b (see docs/algorithms.md).
    """
    if level == "none":
        return torch.ones_like(ratio_T)
    return ratio_T if cap is None else ratio_T.clamp(max=cap)


def loglinear_proximal(
    logprobs_T: Float[Tensor, " T"], behaviour_T: Float[Tensor, " T"], lag_T: Float[Tensor, " T"], progress: float
) -> Float[Tensor, " T"]:
    """log π_prox on the line from π_b to π_θ, by how far the versions lie apart, detached.

    With n the learner's version at assembly, v the token's, ``lag_T`` = n − v in batches and ``progress`` = j / M at inner step
    j of M: α = (n − v) / (n + j / M − v), and log π_prox = log π_b + α (log π_θ − log π_b).  α = 0 where v = n: what sampled
    the token is the proximal policy.  At j = 0 the older tokens have α = 1.  A lag of 2 at half the batch gives α = 0.8.
    Li et al. 2025 (A-3PO), arXiv 2512.06547.
    """
    share_T = torch.where(lag_T > 0, lag_T / (lag_T + progress).clamp(min=1e-12), 0.0)
    return (behaviour_T + share_T * (logprobs_T - behaviour_T)).detach()


def rejected(
    proximal_T: Float[Tensor, " T"],
    behaviour_T: Float[Tensor, " T"],
    advantages_T: Float[Tensor, " T"],
    sequence_T: Int[Tensor, " T"],
    *,
    by: Sequence[str],
    bands: Bands,
) -> Bool[Tensor, " T"]:
    """Which tokens at least one of the rejections named in ``by`` leaves out.  A NaN is never left out: it has to show."""
    log_ratio_T = (proximal_T - behaviour_T).detach()
    rejected_T = torch.zeros_like(log_ratio_T, dtype=torch.bool)
    for name in by:
        rejected_T |= REJECTIONS[name](log_ratio_T, advantages_T, sequence_T, bands)
    return rejected_T


def _icepop(log_ratio_T: Tensor, advantages_T: Tensor, sequence_T: Tensor, bands: Bands) -> Tensor:
    """Tokens whose r lies outside the band: Ling Team 2025 (IcePop), arXiv 2510.18855."""
    return _outside(log_ratio_T, bands.icepop)


def _geometric(log_ratio_T: Tensor, advantages_T: Tensor, sequence_T: Tensor, bands: Bands) -> Tensor:
    """Sequences whose geometric mean of r lies outside the band."""
    return _outside(sequence_mean(log_ratio_T, sequence_T), bands.geometric)


def _opsm(log_ratio_T: Tensor, advantages_T: Tensor, sequence_T: Tensor, bands: Bands) -> Tensor:
    """Tokens of negative advantage in sequences with mean log(π_b / π_prox) > δ: DeepSeek-V3.2, arXiv 2512.02556, eq. 9."""
    return (advantages_T < 0) & (-sequence_mean(log_ratio_T, sequence_T) > bands.opsm_delta)


def _outside(log_ratio_T: Tensor, band: tuple[float, float]) -> Tensor:
    ratio_T = log_ratio_T.exp()
    return (ratio_T < band[0]) | (ratio_T > band[1])


REJECTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Bands], Tensor]] = {
    "icepop": _icepop,
    "geometric": _geometric,
    "opsm": _opsm,
}


def effective_sample_size(raw_ratio_T: Float[Tensor, " T"], mask_T: Bool[Tensor, " T"]) -> Float[Tensor, ""]:
    """Kish's effective sample size of the masked tokens as a fraction of their number: (Σr)² / (n Σr²), in (0, 1].

    1 where every ratio is the same, 1/n where one token outweighs all others.  ``[1, 1, 2, 4]`` gives 64 / (4 · 22).
    An empty mask gives 1: nothing was lost.  Fractions of two parts do not average to that of the whole.
    """
    ratio_N = raw_ratio_T[mask_T].double()
    if len(ratio_N) == 0:
        return ratio_N.new_ones(())
    return (ratio_N.sum().square() / (len(ratio_N) * ratio_N.square().sum())).clamp(max=1.0)
