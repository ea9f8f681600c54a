"""What the learner does about tokens that another policy wrote: proximal policy, behaviour weight, rejections, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.algos.corrections import (
    MAX_LOG_RATIO,
    Bands,
    behaviour_ratio,
    behaviour_weight,
    loglinear_proximal,
    rejected,
)
from slipstream.algos.reductions import reduce_to_kept
from slipstream.core import algorithms
from slipstream.core.metrics import Max, Mean, Metrics
from slipstream.trainer.distributed import all_reduced
from slipstream.trainer.packing import PackedRow

MEASURED = ("ratio", "ratio_squared", "truncated", "sampler_kl", "measured_tokens")
"""What is added up about π_prox / π_b over the tokens of a batch, before any of them is rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """What stays fixed for a row's response tokens while its batch is trained on.

    ``proximal_N`` is None where no forward pass is needed for it: in a single inner step the current policy, detached, is the
    proximal one, and ``loglinear`` and ``behaviour`` have none.  ``reference_N`` is None where there is no KL term in the loss.
    ``rl_N`` are the RL weights: the row's own, or what a rejection has left of them.  ``values_N`` and ``returns_N`` are a
    critic's, where there is one.
    """

    rl_N: Float[Tensor, " N"]
    proximal_N: Float[Tensor, " N"] | None = None
    reference_N: Float[Tensor, " N"] | None = None
    values_N: Float[Tensor, " N"] | None = None
    returns_N: Float[Tensor, " N"] | None = None


@dataclass(slots=True, kw_only=True)
class MiniBatch:
    """One optimizer step of each pass: this rank's rows; denominators and ``tokens`` (prompts included) are global."""

    rows: list[PackedRow]
    anchors: list[Anchors]
    rl_denominator: float
    ce_denominator: float
    distill_denominator: float
    tokens: int

    @property
    def empty(self) -> bool:
        """No stream has a weight."""
        return not (self.rl_denominator or self.ce_denominator or self.distill_denominator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A row after rejection: its weights, its ``share`` of the new denominator, and how many tokens are left."""

    rl_N: Float[Tensor, " N"]
    share: Tensor
    kept: Tensor
    sums: dict[str, Tensor]
    ratio_max: Tensor


class OffPolicy:
    """The keys ``correction`` and ``proximal`` of the recipe's ``algo`` section, at work on packed rows."""

    def __init__(self, algo: algorithms.Algo) -> None:
        self.rejects = bool(algo.correction.reject)
        self.loglinear = algo.proximal == "loglinear"
        self.coupled = algo.proximal == "behaviour"
        self.cap = algo.correction.cap
        self._level = algo.correction.weight
        self._by = algo.correction.reject
        self._reduction = algo.reduction
        icepop, geometric = algo.correction.icepop, algo.correction.geometric
        self._bands = Bands(
            icepop=(icepop.low, icepop.high),
            geometric=(geometric.low, geometric.high),
            opsm_delta=algo.correction.opsm_delta,
        )

    def needs_forward(self, inner_steps: int) -> bool:
        """Whether a batch of so many steps has to know π_prox before the first of them."""
        return self.rejects or (inner_steps > 1 and not self.loglinear and not self.coupled)

    def proximal(self, logprobs_R: Tensor, row: PackedRow, anchors: Anchors, rl: Tensor, progress: float) -> Tensor:
        """log π_prox of the ``R`` tokens that ``rl`` picks, detached; ``progress`` is j / M at inner step j of M."""
        if self.loglinear:
            return loglinear_proximal(logprobs_R, row.behaviour_N[rl], row.lag_N[rl], progress)
        if self.coupled:
            return row.behaviour_N[rl]
        return logprobs_R.detach() if anchors.proximal_N is None else anchors.proximal_N[rl]

    def weigh(self, proximal_R: Tensor, row: PackedRow, rl: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The behaviour weight of ``R`` tokens, the sums of ``MEASURED``, and the largest ratio before truncation."""
        behaviour_R = row.behaviour_N[rl]
        ratio_R = behaviour_ratio(proximal_R, behaviour_R, row.sequence_N[rl], self._level)
        weight_R = behaviour_weight(ratio_R, level=self._level, cap=self.cap)
        sums = {
            "ratio": ratio_R.sum(),
            "ratio_squared": ratio_R.double().square().sum(),
            "truncated": weight_R.sum(),
            "sampler_kl": (behaviour_R - proximal_R).sum(),
            "measured_tokens": rl.sum(),
        }
        return weight_R, sums, ratio_R.max()

    def kl_weight(self, current_R: Tensor, behaviour_R: Tensor) -> Tensor:
        """min(π_θ / π_b, cap) per token, detached: a KL to the reference is one over the current policy's own samples."""
        ratio_R = (current_R - behaviour_R).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return behaviour_weight(ratio_R, level="token", cap=self.cap)

    def judge(self, row: PackedRow, proximal_N: Tensor) -> Verdict:
        """Decide which tokens of the row stay for the whole batch; to be called once, on fixed log-probs."""
        rl = row.rl_N != 0
        zero = torch.zeros((), dtype=torch.float64, device=row.rl_N.device)
        if not bool(rl.any()):
            return Verdict(rl_N=row.rl_N, share=zero, kept=zero, sums=dict.fromkeys(MEASURED, zero), ratio_max=zero)
        proximal_R, sequence_R = proximal_N[rl], row.sequence_N[rl]
        out_R = rejected(proximal_R, row.behaviour_N[rl], row.advantages_N[rl], sequence_R, by=self._by, bands=self._bands)
        weights_R, share = reduce_to_kept(self._reduction, row.rl_N[rl], ~out_R, sequence_R)
        _, sums, ratio_max = self.weigh(proximal_R, row, rl)
        rl_N = row.rl_N.clone()
        rl_N[rl] = weights_R
        return Verdict(rl_N=rl_N, share=share, kept=(~out_R).sum(), sums=sums, ratio_max=ratio_max)

    def denominator(self, stamped: float, share: float, kept: float) -> float:
        """Of a mini-batch after rejection, from global sums; 0 where nothing is left of it."""
        if not kept:
            return 0.0
        return stamped if self._reduction == "constant" else share


def judge(minibatches: Sequence[MiniBatch], offpolicy: OffPolicy) -> tuple[dict[str, float], list[Tensor], float]:
    """Take rejected tokens out of the weights and denominators of a whole batch.  Collective.

    Returns the global sums of ``MEASURED`` over the tokens before that, this rank's largest ratios, and how many tokens were
    rejected.
    """
    measured, tops, kept_tokens = dict.fromkeys(MEASURED, 0.0), [torch.zeros(())], 0.0
    for part in (p for p in minibatches if p.rl_denominator):
        verdicts = []
        for row, fixed in zip(part.rows, part.anchors, strict=True):
            assert fixed.proximal_N is not None, "a rejection decides on fixed log-probs"
            verdicts.append(offpolicy.judge(row, fixed.proximal_N))
        part.anchors = [replace(fixed, rl_N=v.rl_N) for fixed, v in zip(part.anchors, verdicts, strict=True)]
        columns = [[v.share for v in verdicts], [v.kept for v in verdicts]]
        columns += [[v.sums[name] for v in verdicts] for name in MEASURED]
        share, kept, *totals = all_reduced([torch.stack([x.double() for x in column]).sum() for column in columns])
        part.rl_denominator = offpolicy.denominator(part.rl_denominator, share, kept)
        measured = {name: measured[name] + total for name, total in zip(MEASURED, totals, strict=True)}
        tops += [v.ratio_max for v in verdicts]
        kept_tokens += kept
    return measured, tops, measured["measured_tokens"] - kept_tokens


def batch_metrics(measured: dict[str, float], last_step: dict[str, float], ratio_max: float, rejected_tokens: float) -> Metrics:
    """How far off-policy a batch was: sampler against learner over its tokens, and its own drift by the last inner step.

    The ratio is π_prox / π_b at the level of ``correction.weight``.  ``offpolicy/ess`` is Kish's (Σr)² / (n Σr²) of it before
    truncation, 1 for an on-policy batch; ``offpolicy/sampler_kl`` is the k1 estimate of KL(π_b ‖ π_prox) per token, and
    ``offpolicy/inner_kl`` the k3 estimate of KL(π_prox ‖ π_θ).  With ``proximal: behaviour`` the learner is the current policy
    as each step of the first pass finds it, and the drift holds the lag too.
    """
    metrics: Metrics = {}
    if tokens := measured["measured_tokens"]:
        metrics |= {
            "offpolicy/ratio_mean": Mean(measured["ratio"] / tokens, tokens),
            "offpolicy/ratio_max": Max(ratio_max),
            "offpolicy/ratio_truncated_mean": Mean(measured["truncated"] / tokens, tokens),
            "offpolicy/ess": Mean(min(1.0, measured["ratio"] ** 2 / (tokens * measured["ratio_squared"]))),
            "offpolicy/sampler_kl": Mean(measured["sampler_kl"] / tokens, tokens),
            "offpolicy/masked_frac": Mean(rejected_tokens / tokens, tokens),
        }
    if tokens := last_step["written_tokens"]:
        metrics |= {
            "offpolicy/inner_step": Mean(last_step["drift"] / tokens, tokens),
            "offpolicy/inner_kl": Mean(last_step["inner_kl"] / tokens, tokens),
        }
    return metrics
