"""What a packed row contributes to the loss, and what is measured on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.algos import kl, losses
from slipstream.algos.corrections import behaviour_weight
from slipstream.algos.logprobs import selective_logprobs
from slipstream.core import schema
from slipstream.core.metrics import Max, Mean, Metrics
from slipstream.trainer.packing import PackedRow

TERMS = ("policy", "kl", "ce")
"""The parts of the loss, each already divided by its denominator: their sum is the loss of the optimizer step."""
OVER_RL_TOKENS = ("entropy", "clipped", "reference_kl", "drift", "ratio", "ratio_squared", "truncated", "sampler_kl")
SUMS = (*TERMS, *OVER_RL_TOKENS, "rl_tokens", "ce_tokens")
"""Everything that is added up over rows and ranks; a ratio of two of them is then global, whatever the packing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """Log-probabilities of a row's response tokens that stay fixed while its batch is trained on.

    ``proximal_N`` is None where the batch has a single inner step: the current policy, detached, is the proximal one.
    ``reference_N`` is None where there is no KL term in the loss.
    """

    proximal_N: Float[Tensor, " N"] | None = None
    reference_N: Float[Tensor, " N"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """``loss`` carries the graph; ``sums`` are detached, by the names of ``SUMS``; ``ratio_max`` is 0 without RL tokens."""

    loss: Float[Tensor, ""]
    sums: dict[str, Tensor]
    ratio_max: Tensor


class Objective:
    """Σ rl · (surrogate + coefficient · KL) / rl_denominator + Σ ce · (−log π) / ce_denominator.

    The RL stream sees the policy at the sampling temperature, which is the one that wrote the tokens; the cross-entropy
    stream sees it at temperature 1.  Tokens of weight 0 do not enter: not even a NaN of theirs would.
    """

    def __init__(self, algo: schema.Algo, temperature: float) -> None:
        self.kl = algo.kl if algo.kl.coefficient and algo.kl.placement == "loss" else None
        self.temperature = temperature
        self._loss = losses.LOSSES["clipped_surrogate"]
        self._config = losses.SurrogateConfig(
            clip_low=algo.clip_low, clip_high=algo.clip_high, dual_clip=algo.dual_clip, behaviour_cap=algo.behaviour_cap
        )

    def __call__(
        self, logits_NV: Float[Tensor, "N V"], row: PackedRow, anchors: Anchors, *, rl_denominator: float, ce_denominator: float
    ) -> Contribution:
        """The row's share of the step's loss.  A denominator of 0 leaves its stream out."""
        zero = torch.zeros((), dtype=torch.float64, device=logits_NV.device)
        sums, ratio_max = dict.fromkeys(SUMS, zero), zero
        loss = logits_NV[0, 0].float() * 0.0  # a row without weight still needs a graph, or its rank's backward would lag
        logprobs_N, entropy_N = selective_logprobs(logits_NV, row.targets_N, temperature=self.temperature)
        if rl_denominator and bool((rl := row.rl_N != 0).any()):
            part, measured, ratio_max = self._rl(logprobs_N[rl], entropy_N[rl], row, anchors, rl)
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
        self, logprobs_R: Tensor, entropy_R: Tensor, row: PackedRow, anchors: Anchors, rl: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The undivided loss of the ``R`` tokens of RL weight, its sums, and the largest π_prox / π_b."""
        weight_R, behaviour_R = row.rl_N[rl], row.behaviour_N[rl]
        proximal_R = logprobs_R.detach() if anchors.proximal_N is None else anchors.proximal_N[rl]
        terms = losses.PolicyTerms(
            logprobs_T=logprobs_R, proximal_T=proximal_R, behaviour_T=behaviour_R, advantages_T=row.advantages_N[rl]
        )
        loss = policy = (weight_R * self._loss(terms, self._config)).sum()
        truncated_R, ratio_R = behaviour_weight(proximal_R, behaviour_R, cap=self._config.behaviour_cap)
        sums = {
            "policy": policy.detach(),
            "entropy": entropy_R.sum(),
            "clipped": losses.clip_fraction(terms, self._config).sum(),
            "drift": (logprobs_R.detach() - proximal_R).abs().sum(),
            "ratio": ratio_R.sum(),
            "ratio_squared": ratio_R.double().square().sum(),
            "truncated": truncated_R.sum(),
            "sampler_kl": (behaviour_R - proximal_R).sum(),
            "rl_tokens": rl.sum(),
        }
        if self.kl is not None:
            assert anchors.reference_N is not None, "a KL term in the loss needs reference log-probabilities"
            reference_R = anchors.reference_N[rl]
            penalty = self.kl.coefficient * (weight_R * kl.kl_loss(logprobs_R, reference_R, self.kl.estimator)).sum()  # type: ignore[arg-type]
            loss = loss + penalty
            sums |= {
                "kl": penalty.detach(),
                "reference_kl": kl.kl_value(logprobs_R.detach(), reference_R, self.kl.estimator).sum(),
            }
        return loss, sums, ratio_R.max()


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


def batch_metrics(first_pass: dict[str, float], last_step: dict[str, float], ratio_max: float) -> Metrics:
    """How far off-policy a batch was: sampler against learner over its tokens, and its own drift by the last inner step.

    ``offpolicy/ess`` is Kish's (Σr)² / (n Σr²) of r = π_prox / π_b before truncation, 1 for an on-policy batch;
    ``offpolicy/sampler_kl`` is the k1 estimate of KL(π_b ‖ π_prox).
    """
    metrics: Metrics = {}
    if tokens := first_pass["rl_tokens"]:
        metrics |= {
            "offpolicy/ratio_mean": Mean(first_pass["ratio"] / tokens, tokens),
            "offpolicy/ratio_max": Max(ratio_max),
            "offpolicy/ratio_truncated_mean": Mean(first_pass["truncated"] / tokens, tokens),
            "offpolicy/ess": Mean(min(1.0, first_pass["ratio"] ** 2 / (tokens * first_pass["ratio_squared"]))),
            "offpolicy/sampler_kl": Mean(first_pass["sampler_kl"] / tokens, tokens),
        }
    if tokens := last_step["rl_tokens"]:
        metrics["offpolicy/inner_step"] = Mean(last_step["drift"] / tokens, tokens)
    return metrics
