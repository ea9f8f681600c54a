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
from slipstream.distill.divergences import reverse_kl
from slipstream.trainer.offpolicy import MEASURED, Anchors, OffPolicy
from slipstream.trainer.packing import PackedRow

TERMS = ("policy", "kl", "ce", "distill")
"""The parts of the loss, each already divided by its denominator: their sum is the loss of the optimizer step."""
WRITTEN = ("entropy", "drift", "inner_kl", *MEASURED, "written_tokens")
"""About the policy and the tokens it wrote: of the RL stream, or of the distillation stream where that is alone."""
SUMS = (*TERMS, *WRITTEN, "clipped", "reference_kl", "teacher_kl", "rl_tokens", "ce_tokens", "distill_tokens")
"""Everything that is added up over rows and ranks; a ratio of two of them is then global, whatever the packing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """``loss`` carries the graph; ``sums`` are detached, by the names of ``SUMS``; ``ratio_max`` is 0 without tokens that the
    policy wrote."""

    loss: Float[Tensor, ""]
    sums: dict[str, Tensor]
    ratio_max: Tensor


class Objective:
    """Σ rl · (w · loss + coefficient · KL) / rl_denominator + Σ ce · (−log π) / ce_denominator
    + ``distill_coefficient`` · Σ distill · w · KL(π ‖ π_T) / distill_denominator, with the behaviour weight w.

    The RL stream sees the policy at the sampling temperature, which is the one that wrote the tokens, and the distillation
    stream sees policy and teacher so; the cross-entropy stream sees the policy at temperature 1.  Tokens of weight 0 do not
    enter: not even a NaN of theirs would.
    """

    def __init__(self, algo: algorithms.Algo, temperature: float, distill_coefficient: float) -> None:
        self.kl = algo.kl if algo.kl.coefficient and algo.kl.placement == "loss" else None
        self.offpolicy = OffPolicy(algo)
        self.temperature = temperature
        self._distill_coefficient = distill_coefficient
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
        distill_denominator: float,
        progress: float,
        teacher_NV: Float[Tensor, "N V"] | None = None,
    ) -> Contribution:
        """The row's share of the step's loss.  A denominator of 0 leaves its stream out; distillation needs ``teacher_NV``."""
        zero = torch.zeros((), dtype=torch.float64, device=logits_NV.device)
        sums, ratio_max = dict.fromkeys(SUMS, zero), zero
        loss = logits_NV[0, 0].float() * 0.0  # a row without weight still needs a graph, or its rank's backward would lag
        logprobs_N, entropy_N = selective_logprobs(logits_NV, row.targets_N, temperature=self.temperature)
        if rl_denominator and bool((rl := anchors.rl_N != 0).any()):
            part, measured, ratio_max = self._rl(logprobs_N[rl], entropy_N[rl], row, anchors, rl, progress)
            loss = loss + part / rl_denominator
            sums |= {k: v / rl_denominator if k in TERMS else v for k, v in measured.items()}
        if distill_denominator and bool((distill := row.distill_N != 0).any()):
            assert teacher_NV is not None, "a distillation stream needs a teacher"
            kl_R = reverse_kl(logits_NV, teacher_NV, temperature=self.temperature)[distill]
            _, weight_R, measured, top = self._weigh(logprobs_N[distill], entropy_N[distill], row, anchors, distill, progress)
            part = self._distill_coefficient * (row.distill_N[distill] * weight_R * kl_R).sum() / distill_denominator
            loss = loss + part
            sums |= {"distill": part.detach(), "teacher_kl": kl_R.detach().sum(), "distill_tokens": distill.sum()}
            if not rl_denominator:
                sums, ratio_max = sums | measured, top
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
        proximal_R, behaviour_weight_R, measured, ratio_max = self._weigh(logprobs_R, entropy_R, row, anchors, rl, progress)
        terms = losses.PolicyTerms(
            logprobs_T=logprobs_R,
            proximal_T=proximal_R,
            behaviour_T=row.behaviour_N[rl],
            advantages_T=row.advantages_N[rl],
            sequence_T=row.sequence_N[rl],
        )
        loss_R, cut_R = self._loss(terms, self._config)
        loss = policy = (weight_R * (behaviour_weight_R * loss_R)).sum()
        sums = measured | {"policy": policy.detach(), "clipped": cut_R.sum(), "rl_tokens": rl.sum()}
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

    def _weigh(
        self, logprobs_R: Tensor, entropy_R: Tensor, row: PackedRow, anchors: Anchors, chosen: Tensor, progress: float
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
        """log π_prox and behaviour weight of ``R`` ``chosen`` tokens, the sums of ``WRITTEN``, and the largest π_prox / π_b."""
        current_R = logprobs_R.detach()
        proximal_R = self.offpolicy.proximal(logprobs_R, row, anchors, chosen, progress)
        learner_R = current_R if self.offpolicy.coupled else proximal_R  # else nothing would be measured: π_prox is π_b
        weight_R, measured, ratio_max = self.offpolicy.weigh(learner_R, row, chosen)
        sums = measured | {
            "entropy": entropy_R.sum(),
            "drift": (current_R - proximal_R).abs().sum(),
            "inner_kl": kl.kl_value(proximal_R, current_R, "k3").sum(),
            "written_tokens": chosen.sum(),
        }
        return proximal_R, weight_R, sums, ratio_max


def step_metrics(sums: dict[str, float], *, with_kl: bool) -> Metrics:
    """Of one optimizer step, from its global sums."""
    metrics: Metrics = {}
    if tokens := sums["written_tokens"]:
        metrics["loss/entropy"] = Mean(sums["entropy"] / tokens, tokens)
    if tokens := sums["rl_tokens"]:
        metrics |= {
            "loss/policy": Mean(sums["policy"]),
            "offpolicy/clip_frac": Mean(sums["clipped"] / tokens, tokens),
        }
        if with_kl:
            metrics |= {"loss/kl": Mean(sums["kl"]), "kl/ref": Mean(sums["reference_kl"] / tokens, tokens)}
    if sums["ce_tokens"]:
        metrics["loss/ce"] = Mean(sums["ce"])
    if tokens := sums["distill_tokens"]:
        metrics |= {"loss/distill": Mean(sums["distill"]), "distill/kl": Mean(sums["teacher_kl"] / tokens, tokens)}
    return metrics
