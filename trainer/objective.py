"""What a packed row contributes to the loss, and what is measured on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.algos import kl, losses
from slipstream.algos.logprobs import selective_logprobs
from slipstream.core import algorithms
from slipstream.core.metrics import Mean, Metrics
from slipstream.trainer.offpolicy import MEASURED, Anchors, OffPolicy
from slipstream.trainer.packing import PackedRow

TERMS = ("policy", "kl", "ce")
"""The parts of the loss, each already divided by its denominator: their sum is the loss of the optimizer step."""
OVER_RL_TOKENS = ("entropy", "clipped", "reference_kl", "drift", "inner_kl", *MEASURED)
SUMS = (*TERMS, *OVER_RL_TOKENS, "rl_tokens", "ce_tokens")
"""Everything that is added up over rows and ranks; a ratio of two of them is then global, whatever the packing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """``loss`` carries the graph; ``sums`` are detached, by the names of ``SUMS``; ``ratio_max`` is 0 without RL tokens."""

    loss: Float[Tensor, ""]
    sums: dict[str, Tensor]
    ratio_max: Tensor


class Objective:
    """Σ rl · (w · loss + coefficient · KL) / rl_denominator + Σ ce · (−log π) / ce_denominator, with the behaviour weight w.

    The RL stream sees the policy at the sampling temperature, which is the one that wrote the tokens; the cross-entropy
    stream sees it at temperature 1.  Tokens of weight 0 do not enter: not even a NaN of theirs would.
    """

    def __init__(self, algo: algorithms.Algo, temperature: float) -> None:
        self.kl = algo.kl if algo.kl.coefficient and algo.kl.placement == "loss" else None
        self.offpolicy = OffPolicy(algo)
        self.temperature = temperature
        self._loss = losses.LOSSES[algo.loss]
        self._config = losses.SurrogateConfig(clip_low=algo.clip_low, clip_high=algo.clip_high, dual_clip=algo.dual_clip)

    def __call__(
        self,
        logits_NV: Float[Tensor, "N V"],
        row: PackedRow,
        anchors: Anchors,
        *,
        rl_denominator: float,
        ce_denominator: float,
        progress: float,
    ) -> Contribution:
        """The row's share of the step's loss.  A denominator of 0 leaves its stream out."""
        zero = torch.zeros((), dtype=torch.float64, device=logits_NV.device)
        sums, ratio_max = dict.fromkeys(SUMS, zero), zero
        loss = logits_NV[0, 0].float() * 0.0  # a row without weight still needs a graph, or its rank's backward would lag
        logprobs_N, entropy_N = selective_logprobs(logits_NV, row.targets_N, temperature=self.temperature)
        if rl_denominator and bool((rl := anchors.rl_N != 0).any()):
            part, measured, ratio_max = self._rl(logprobs_N[rl], entropy_N[rl], row, anchors, rl, progress)
            loss = loss + part / rl_denominator
            sums |= {k: v / rl_denominator if k in TERMS else v for k, v in measured.items()}
        if ce_denominator and bool((ce := row.ce_N != 0).any()):
            if self.temperature != 1.0:
                logprobs_N, _ = selective_logprobs(logits_NV, row.targets_N)
            part = (row.ce_N[ce] * losses.token_cross_entropy(logprobs_N[ce])).sum()
            loss = loss + part / ce_denominator
            sums |= {"ce": part.detach() / ce_denominator, "ce_tokens": ce.sum()}
        return Contribution(loss=loss, sums=sums, ratio_max=ratio_max)

    def _rl(
        self, logprobs_R: Tensor, entropy_R: Tensor, row: PackedRow, anchors: Anchors, rl: Tensor, progress: float
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The undivided loss of the ``R`` tokens of RL weight, its sums, and the largest π_prox / π_b."""
        weight_R, current_R = anchors.rl_N[rl], logprobs_R.detach()
        proximal_R = self.offpolicy.proximal(logprobs_R, row, anchors, rl, progress)
        behaviour_weight_R, measured, ratio_max = self.offpolicy.weigh(proximal_R, row, rl)
        terms = losses.PolicyTerms(
            logprobs_T=logprobs_R,
            proximal_T=proximal_R,
            behaviour_T=row.behaviour_N[rl],
            advantages_T=row.advantages_N[rl],
            sequence_T=row.sequence_N[rl],
        )
        loss_R, cut_R = self._loss(terms, self._config)
        loss = policy = (weight_R * (behaviour_weight_R * loss_R)).sum()
        sums = measured | {
            "policy": policy.detach(),
            "entropy": entropy_R.sum(),
            "clipped": cut_R.sum(),
            "drift": (current_R - proximal_R).abs().sum(),
            "inner_kl": kl.kl_value(proximal_R, current_R, "k3").sum(),
            "rl_tokens": rl.sum(),
        }
        if self.kl is not None:
            assert anchors.reference_N is not None, "a KL term in the loss needs reference log-probabilities"
            reference_R = anchors.reference_N[rl]
            if self.kl.importance:
                weight_R = weight_R * self.offpolicy.kl_weight(current_R, row.behaviour_N[rl])
            penalty = self.kl.coefficient * (weight_R * kl.kl_loss(logprobs_R, reference_R, self.kl.estimator)).sum()  # type: ignore[arg-type]
            loss = loss + penalty
            sums |= {
                "kl": penalty.detach(),
                "reference_kl": kl.kl_value(current_R, reference_R, self.kl.estimator).sum(),
            }
        return loss, sums, ratio_max


def step_metrics(sums: dict[str, float], *, with_kl: bool) -> Metrics:
    """Of one optimizer step, from its global sums."""
    metrics: Metrics = {}
    if tokens := sums["rl_tokens"]:
        metrics |= {
            "loss/policy": Mean(sums["policy"]),
            "loss/entropy": Mean(sums["entropy"] / tokens, tokens),
            "offpolicy/clip_frac": Mean(sums["clipped"] / tokens, tokens),
        }
        if with_kl:
            metrics |= {"loss/kl": Mean(sums["kl"]), "kl/ref": Mean(sums["reference_kl"] / tokens, tokens)}
    if sums["ce_tokens"]:
        metrics["loss/ce"] = Mean(sums["ce"])
    return metrics
