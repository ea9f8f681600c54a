"""One rank of the learner: DeepSpeed around a policy, blind to the algorithm that stamped the tokens.

A batch is a few optimizer steps; ranks and micro-batches are how a step is cut up, and leave no trace in its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.algos.logprobs import selective_logprobs
from slipstream.core import schema
from slipstream.core.metrics import Last, Mean, Metrics, Sum, merge
from slipstream.core.mistakes import UserError
from slipstream.core.records import TrainBatch, TrainSample, WeightVersion
from slipstream.core.weights import Bucket, TensorSpec
from slipstream.distill.teacher import Teacher
from slipstream.trainer import publisher, state
from slipstream.trainer.critic import Critic, load_critic
from slipstream.trainer.distributed import all_gathered, all_reduced, device
from slipstream.trainer.model import load_policy, packed_logits
from slipstream.trainer.objective import SUMS, TERMS, Objective, step_metrics
from slipstream.trainer.offpolicy import MEASURED, Anchors, MiniBatch, batch_metrics, judge
from slipstream.trainer.optim import ShardedAdamW, build_adamw, learning_rate
from slipstream.trainer.packing import PackedRow, pack, partition
from slipstream.trainer.teacher import HuggingFaceTeacher


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training with one optimizer: the warm start, or RL.  ``total_steps`` counts optimizer steps."""

    optimizer: schema.Optimizer
    total_steps: int
    epochs: int


ROW_TOKENS = {"cuda": 8192, "cpu": 512}
"""Tokens of a packed row unless the recipe says otherwise: a CPU's attention pays the square of the row (measured with the tiny
model: 10,000 tokens/s in rows of 256 to 512, 2,300 in rows of 8192)."""


class Learner:
    """``join`` the group, make one on every rank, ``begin_phase``, then ``train`` batch after batch.

    Every method is collective: all ranks call it, with the same arguments, in the same order.
    """

    def __init__(self, recipe: schema.Recipe, model_path: Path, rank: int, world_size: int) -> None:
        trainer = recipe.trainer
        if recipe.model.dtype == "bfloat16" and trainer.zero_stage == 0:
            raise UserError(
                "trainer.zero_stage: got 0 with model.dtype bfloat16, expected 1, 2 or 3: only they keep float32 weights and "
                "accumulate gradients in float32 (stage 1 costs nothing, also on one rank)"
            )
        assert (rank, world_size) == (dist.get_rank(), dist.get_world_size()), "join the process group first"
        self.recipe, self.model_path, self.rank, self.world_size = recipe, model_path, rank, world_size
        self.policy = load_policy(model_path, recipe.model)
        publisher.engine_specs(self.policy)  # a model that could not be published is refused now, not after the first step
        self.reference: Any = None
        self.teacher: Teacher | None = None
        self.critic: Critic | None = None
        self.engine = self._trained(self.policy)
        self.adamw = ShardedAdamW(self.engine)
        self.phase: Phase | None = None
        self._row_tokens = trainer.max_tokens_per_microbatch or ROW_TOKENS[device().type]
        self._objective = Objective(recipe.algo, recipe.rollout.sampling.temperature, recipe.distill.coefficient)

    def begin_phase(self, optimizer: schema.Optimizer, total_steps: int, epochs: int | None = None) -> None:
        """Start over with the optimizer, not with the weights: moments, step count, schedule and hyperparameters.

        ``total_steps`` counts optimizer steps (epochs × mini-batches a batch) and is where a decaying schedule ends.
        ``epochs`` are the passes over each batch: ``algo.epochs`` by default, 1 for a warm start.
        """
        self.phase = Phase(optimizer, total_steps, self.recipe.algo.epochs if epochs is None else epochs)
        self.adamw.reset(optimizer)

    def set_reference(self, path: Path | None = None) -> None:
        """Freeze the KL reference: the model of a folder (``model.reference``, resolved), or the policy as it is now."""
        if path is not None or self.reference is None:
            self.reference = self._frozen(path or self.model_path)
        if path is None:
            gathered = deepspeed.zero.GatheredParameters
            pairs = zip(self.reference.named_parameters(), self.policy.parameters(), strict=True)
            for (name, frozen), trained in pairs:
                with gathered([trained]), gathered([frozen], modifier_rank=0):
                    assert frozen.shape == trained.shape, f"{name}: got {trained.shape}, expected {frozen.shape}"
                    frozen.data.copy_(trained.data)

    def set_teacher(self, path: Path) -> None:
        """The teacher of the distillation stream (``distill.teacher``, resolved): another model of the same vocabulary."""
        self.teacher = HuggingFaceTeacher(self._frozen(path))

    def set_critic(self, path: Path | None = None) -> None:
        """A critic with a fresh optimizer: the model of a folder (``algo.critic.path``, resolved; or one that ``save`` wrote),
        or the policy as it is now, with a value head of zeros."""
        module = load_critic(path or self.model_path, self.recipe.model)
        if path is None:
            policy = dict(self.policy.named_parameters())
            for name, copy in module.base_model.named_parameters(prefix=module.base_model_prefix):
                with deepspeed.zero.GatheredParameters([policy[name]]):
                    copy.data.copy_(policy[name].data)
        self.critic = Critic(self._trained(module), self.recipe, self.world_size)

    def _trained(self, module: Any) -> Any:
        """A DeepSpeed engine with an AdamW of its own."""
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=build_adamw(module), config=deepspeed_config(self.recipe), dist_init_required=False
        )
        return engine

    def _frozen(self, path: Path) -> Any:
        """A model that is only asked, whole on every rank, or sharded like the policy under ZeRO-3."""
        model = load_policy(path, self.recipe.model).requires_grad_(False)
        if self.recipe.trainer.zero_stage < 3:
            return model.to(device())
        engine, *_ = deepspeed.initialize(model=model, config=deepspeed_config(self.recipe), dist_init_required=False)
        return engine

    def train(self, batch: TrainBatch) -> Metrics:
        """All inner optimizer steps of a batch.  Returns global metrics, the same on every rank.

        A mini-batch without weight in any stream (every token was stale) makes no step: Adam's momentum would move the
        weights without a gradient.
        Raises FloatingPointError, naming the batch, if a loss or gradient norm is not finite: that step is then not
        applied (earlier inner steps of the batch are), and the learner is to be restored from a checkpoint.
        The step that finds the policy beyond ``algo.max_inner_kl`` is the batch's last.
        A critic makes the advantages first, and takes its step before the policy's; in its warm-up the policy takes none.
        """
        assert self.phase is not None, "begin_phase comes before train"
        inner_steps = self.phase.epochs * len(batch.minibatches)
        minibatches = self._minibatches(batch, inner_steps)
        parts: list[Metrics] = [self.critic.appraise(minibatches)] if self.critic is not None else []
        tokens = 0
        judged = judge(minibatches, self._objective.offpolicy) if self._objective.offpolicy.rejects else None
        measured, ratio_tops, sums = dict.fromkeys(MEASURED, 0.0), [torch.zeros(())], dict.fromkeys(SUMS, 0.0)
        for step in range(inner_steps):
            epoch, index = divmod(step, len(minibatches))
            part = minibatches[index]
            if part.empty:
                continue
            tokens += part.tokens
            where = f"batch {batch.version}, epoch {epoch}, mini-batch {index}"
            if self.critic is not None:
                parts.append(self.critic.step(part, where))
            if self._warming(batch.version):
                continue
            sums, tops, metrics = self._step(part, step / inner_steps, where)
            parts.append(metrics)
            if epoch == 0:
                measured = {name: measured[name] + sums[name] for name in MEASURED}
                ratio_tops += tops
            stops = self._drifted(sums) and step + 1 < inner_steps
            if self.recipe.algo.max_inner_kl is not None:
                parts.append({"offpolicy/early_stops": Sum(float(stops))})
            if stops:
                break
        rejected_tokens = 0.0
        if judged is not None:
            measured, ratio_tops, rejected_tokens = judged
        (ratio_max,) = all_reduced([torch.stack([top.cpu() for top in ratio_tops]).max()], dist.ReduceOp.MAX)
        return {
            **merge(parts),
            **batch_metrics(measured, sums, ratio_max, rejected_tokens),
            "time/train_tokens": Sum(tokens),
        }

    def logprobs(self, samples: Sequence[TrainSample], which: Literal["policy", "reference", "teacher"]) -> list[list[float]]:
        """Log-probability of every response token at the sampling temperature, ``[sample][token]``, on every rank."""
        scorer = {"policy": self._policy_logits, "reference": self._reference_logits, "teacher": self._teacher_logits}[which]
        plan = partition(samples, self.world_size, self._row_tokens)
        mine: dict[int, list[float]] = {}
        for indices in plan[self.rank]:
            row = pack([samples[i] for i in indices]).to(device())
            mine |= zip(indices, row.unpack(self._logprobs(scorer, row)), strict=True)
        found = {index: values for part in all_gathered(mine) for index, values in part.items()}
        return [found[i] for i in range(len(samples))]

    def buckets(self, bucket_bytes: int) -> Iterator[tuple[Bucket, np.ndarray[Any, Any], int]]:
        """The policy's weights for the engines; see ``publisher.buckets``."""
        return publisher.buckets(self.policy, bucket_bytes)

    def engine_specs(self) -> list[TensorSpec]:
        """What the engines load, in publication order."""
        return publisher.engine_specs(self.policy)

    def engine_tensors(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """The same as whole tensors on this rank's device, for transports between GPUs; every rank has to exhaust it."""
        for bucket, held in publisher.gathered(self.policy, bucket_bytes):
            yield from ((spec.name, parameter.detach()) for spec, parameter in zip(bucket.tensors, held, strict=True))

    def save(self, folder: Path) -> None:
        """Write the whole state of training into ``folder``; see ``state``."""
        state.save(self, folder)

    def load(self, folder: Path, total_steps: int | None = None) -> None:
        """Continue, bit for bit, where ``save`` was called; on another number of ranks or ZeRO stage, to rounding.

        ``total_steps`` moves the end of the phase, which a decaying schedule is aimed at.
        """
        state.load(self, folder, total_steps)

    def _minibatches(self, batch: TrainBatch, inner_steps: int) -> list[MiniBatch]:
        """This rank's rows of every mini-batch, with what has to be known of them before the first step."""
        found = []
        with_proximal = self._objective.offpolicy.needs_forward(inner_steps)
        streams = (batch.rl_denominators, batch.ce_denominators, batch.distill_denominators)
        for samples, rl, ce, distill in zip(batch.minibatches, *streams, strict=True):
            plan = partition(samples, self.world_size, self._row_tokens)
            rows = [pack([samples[i] for i in indices]).to(device()) for indices in plan[self.rank]]
            written = rl or distill
            anchors = [self._anchors(row, proximal=with_proximal) if written else Anchors(rl_N=row.rl_N) for row in rows]
            found.append(
                MiniBatch(
                    rows=rows,
                    anchors=anchors,
                    rl_denominator=rl,
                    ce_denominator=ce,
                    distill_denominator=distill,
                    tokens=sum(len(sample.input_ids) for sample in samples),
                )
            )
        return found

    def _anchors(self, row: PackedRow, *, proximal: bool) -> Anchors:
        return Anchors(
            rl_N=row.rl_N,
            proximal_N=self._logprobs(self._policy_logits, row) if proximal else None,
            reference_N=self._logprobs(self._reference_logits, row) if self._objective.kl is not None else None,
        )

    def _warming(self, version: WeightVersion) -> bool:
        """Whether the batch assembled at this version is one of the critic's alone."""
        critic = self.recipe.algo.critic
        return self.critic is not None and critic is not None and version.batch < critic.warmup_batches

    def _drifted(self, sums: dict[str, float]) -> bool:
        """Whether the mini-batch just trained on, as the step found it, is too far from the proximal policy."""
        limit, tokens = self.recipe.algo.max_inner_kl, sums["written_tokens"]
        return limit is not None and tokens > 0 and sums["inner_kl"] / tokens > limit

    def _step(self, part: MiniBatch, progress: float, where: str) -> tuple[dict[str, float], list[Tensor], Metrics]:
        """One optimizer step over this rank's rows: its global sums, this rank's largest ratios, and its metrics."""
        assert self.phase is not None
        contributions = []
        for i, (row, fixed) in enumerate(zip(part.rows, part.anchors, strict=True)):
            self.engine.set_gradient_accumulation_boundary(i == len(part.rows) - 1)
            teacher_NV = self._teacher_logits(row) if part.distill_denominator else None
            share = self._objective(
                self._policy_logits(row),
                row,
                fixed,
                rl_denominator=part.rl_denominator,
                ce_denominator=part.ce_denominator,
                distill_denominator=part.distill_denominator,
                progress=progress,
                teacher_NV=teacher_NV,
            )
            self.engine.backward(share.loss * self.world_size)  # DeepSpeed averages over the ranks; the denominator is global
            contributions.append((share.sums, share.ratio_max))
        totals = all_reduced([torch.stack([sums[name].double() for sums, _ in contributions]).sum() for name in SUMS])
        sums = dict(zip(SUMS, totals, strict=True))
        if not all(math.isfinite(sums[term]) for term in TERMS):
            raise FloatingPointError(f"{where}: loss is not finite ({', '.join(f'{t} {sums[t]}' for t in TERMS)})")
        rate = learning_rate(self.phase.optimizer, self.adamw.steps, self.phase.total_steps)
        try:
            norm = self.adamw.step(rate)
        except FloatingPointError as error:
            raise FloatingPointError(f"{where}: {error}") from error
        metrics = step_metrics(sums, with_kl=self._objective.kl is not None)
        metrics |= {"loss/grad_norm": Mean(norm), "optim/lr": Last(rate)}
        return sums, [top for _, top in contributions], metrics

    @torch.no_grad()
    def _logprobs(self, scorer: Callable[[PackedRow], Tensor], row: PackedRow) -> Tensor:
        logprobs_N, _ = selective_logprobs(scorer(row), row.targets_N, temperature=self._objective.temperature)
        return logprobs_N

    def _policy_logits(self, row: PackedRow) -> Tensor:
        return packed_logits(self.engine, row.input_ids_T, row.position_ids_T, row.predicting_N)

    def _reference_logits(self, row: PackedRow) -> Tensor:
        assert self.reference is not None, "set_reference comes before its log-probabilities"
        return packed_logits(self.reference, row.input_ids_T, row.position_ids_T, row.predicting_N)

    def _teacher_logits(self, row: PackedRow) -> Tensor:
        assert self.teacher is not None, "set_teacher comes before its logits"
        return self.teacher.logits(row.input_ids_T, row.position_ids_T, row.predicting_N)


def deepspeed_config(recipe: schema.Recipe) -> dict[str, Any]:
    """Steps are accumulated by hand (``set_gradient_accumulation_boundary``), so the configured micro-batch is 1 × 1.

    Gradients are clipped by ``ShardedAdamW``; DeepSpeed's own default would clip them at 1.0 once more at ZeRO-0.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": recipe.trainer.zero_stage, "reduce_bucket_size": 50_000_000},
        "bf16": {"enabled": recipe.model.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 2**31,
    }
