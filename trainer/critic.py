"""The critic: a value model with an optimizer of its own, which makes advantages of the rewards of a batch, token by token.

It reads the policy's packed rows, and its loss has the policy's weights and denominators, so that its results do not depend on
ranks, micro-batches or packing either.  Three masks (see ``algos.gae``): GAE goes over every token that the policy wrote, stale
ones included, and over no observation; whitening and the value loss are over the tokens of RL weight, so a stale token passes
credit on and trains neither model.  What a rejection takes from the policy, the critic does not learn from either.  There is no
behaviour weight: the targets are those of the policy that wrote the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel

from slipstream.algos.advantages import STD_EPSILON
from slipstream.algos.gae import gae, value_loss
from slipstream.core import algorithms, schema
from slipstream.core.metrics import Last, Mean, Metrics
from slipstream.core.mistakes import UserError
from slipstream.trainer.distributed import all_reduced, device
from slipstream.trainer.model import DTYPES, config_without_dropout
from slipstream.trainer.offpolicy import MiniBatch
from slipstream.trainer.optim import ShardedAdamW, learning_rate
from slipstream.trainer.packing import PackedRow

EVEN = 1e-12
"""Variance of the returns below which there is nothing to explain."""


def load_critic(path: Path, model: schema.Model) -> PreTrainedModel:
    """The model of a folder with a value head: one number per token, in ``model.dtype``, without cache and any dropout.

    The folder may hold a policy (its head over the vocabulary is left out, and the value head starts at zero), a critic that
    was saved before, or a reward model of one label.
    Raises UserError for an architecture without token classification, a head of several labels, or missing weights.
    """
    require_value_head(path)
    config = config_without_dropout(path)
    config.num_labels, config.classifier_dropout, config.use_cache = 1, 0.0, False
    critic, report = AutoModelForTokenClassification.from_pretrained(
        path,
        config=config,
        dtype=DTYPES[model.dtype],
        attn_implementation="sdpa",
        local_files_only=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    parameters, backbone = dict(critic.named_parameters()), f"{critic.base_model_prefix}."
    misshapen, missing = [name for name, *_ in report["mismatched_keys"]], list(report["missing_keys"])
    if wrong := sorted(misshapen + [name for name in missing if name.startswith(backbone)]):
        raise UserError(
            f"algo.critic.path: {path} lacks {len(wrong)} tensors in the shape that a critic needs ({', '.join(wrong[:3])}); "
            "expected the weights of a policy, or of a model with one label"
        )
    for name, parameter in parameters.items():
        # Out of the mapped file: how a tensor is aligned there decides how sums are rounded, and a checkpoint is another file.
        parameter.data = torch.zeros_like(parameter) if name in missing else parameter.data.clone()
    if model.gradient_checkpointing:
        critic.gradient_checkpointing_enable({"use_reentrant": False})
    return critic.train()


def require_value_head(path: Path) -> None:
    """Raise UserError for an architecture that transformers has no token classification of."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if type(config) not in AutoModelForTokenClassification._model_mapping:
        raise UserError(
            f"algo.critic.path: {path} is a {config.model_type}, for which transformers has no token classification; expected "
            "an architecture such as qwen3 or llama"
        )


class Critic:
    """A DeepSpeed engine around ``load_critic``'s model.  ``appraise`` a batch before its first step, ``step`` in each."""

    def __init__(self, engine: Any, recipe: schema.Recipe, world_size: int) -> None:
        config = recipe.algo.critic
        assert config is not None, "a recipe without critic makes none"
        self.engine = engine
        self.adamw = ShardedAdamW(engine)
        self.adamw.reset(config.optimizer)
        self._config: algorithms.Critic = config
        self._gae_config = recipe.algo.gae
        self._total_steps = recipe.schedule.steps * recipe.algo.inner_steps
        self._world_size = world_size

    @property
    def module(self) -> PreTrainedModel:
        return self.engine.module

    @torch.no_grad()
    def appraise(self, minibatches: Sequence[MiniBatch]) -> Metrics:
        """Give every row its advantages, and its anchors the values and returns, all of the critic as it is now.  Collective.

        ``critic/explained_variance`` is 1 − Var(return − value) / Var(return) over the tokens of RL weight, of λ-returns: they
        lean on the values themselves, unless λ is 1.
        """
        advantages, returns, errors, values = [], [], [], []
        for part in (p for p in minibatches if p.rl_denominator):
            for i, row in enumerate(part.rows):
                values_N = self._values(row)
                advantages_N, returns_N = self._advantages(row, values_N)
                part.rows[i] = replace(row, advantages_N=advantages_N)
                part.anchors[i] = replace(part.anchors[i], values_N=values_N, returns_N=returns_N)
                trained = row.rl_N != 0
                advantages.append(advantages_N[trained])
                returns.append(returns_N[trained])
                errors.append((returns_N - values_N)[trained])
                values.append(values_N[trained])
        tokens, mean, variance = moments(advantages)
        if not tokens:
            return {}
        if self._gae_config.whiten:
            scale = 1 / (math.sqrt(variance) + STD_EPSILON)
            for part in (p for p in minibatches if p.rl_denominator):
                part.rows = [replace(row, advantages_N=(row.advantages_N - mean) * scale) for row in part.rows]
        _, value_mean, _ = moments(values)
        metrics: Metrics = {"critic/value_mean": Mean(value_mean, tokens)}
        (_, _, of_returns), (_, _, of_errors) = moments(returns), moments(errors)
        if of_returns > EVEN:
            metrics["critic/explained_variance"] = Mean(1 - of_errors / of_returns)
        return metrics

    def step(self, part: MiniBatch, where: str) -> Metrics:
        """One optimizer step on a mini-batch of ``appraise``, or none where no token has RL weight.  Collective.

        Raises FloatingPointError, naming ``where``, if loss or gradient norm is not finite; the weights are then unchanged.
        """
        if not part.rl_denominator:
            return {}
        losses, cuts, tokens = [], [], []
        for i, (row, fixed) in enumerate(zip(part.rows, part.anchors, strict=True)):
            assert fixed.values_N is not None and fixed.returns_N is not None, "appraise comes before step"
            self.engine.set_gradient_accumulation_boundary(i == len(part.rows) - 1)
            chosen = fixed.rl_N != 0
            values_N = self._values(row)
            terms = values_N[chosen], fixed.values_N[chosen], fixed.returns_N[chosen]
            loss_R = value_loss(*terms, clip=self._config.clip)
            loss = values_N[0] * 0.0 + (fixed.rl_N[chosen] * loss_R).sum() / part.rl_denominator
            self.engine.backward(loss * self._world_size)  # DeepSpeed averages over the ranks; the denominator is global
            losses.append(loss.detach())
            cuts.append((loss_R > value_loss(*terms, clip=None)).sum())
            tokens.append(chosen.sum())
        columns = (losses, cuts, tokens)
        loss_sum, cut, count = all_reduced([torch.stack([x.double() for x in column]).sum() for column in columns])
        if not math.isfinite(loss_sum):
            raise FloatingPointError(f"{where}: the critic's loss is {loss_sum}")
        rate = learning_rate(self._config.optimizer, self.adamw.steps, self._total_steps)
        try:
            norm = self.adamw.step(rate)
        except FloatingPointError as error:
            raise FloatingPointError(f"{where}: the critic's {error}") from error
        return {
            "critic/loss": Mean(loss_sum),
            "critic/clip_frac": Mean(cut / count, count),
            "critic/grad_norm": Mean(norm),
            "critic/lr": Last(rate),
        }

    def _values(self, row: PackedRow) -> Tensor:
        """``[N]``: of the state before each response token."""
        found = self.engine(input_ids=row.input_ids_T[None], position_ids=row.position_ids_T[None], use_cache=False)
        return found.logits[0, row.predicting_N, 0].float()

    def _advantages(self, row: PackedRow, values_N: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns of a row, sample by sample."""
        advantages_N, returns_N = torch.zeros_like(values_N), torch.zeros_like(values_N)
        start = 0
        for length in row.lengths:
            part = slice(start, start + length)
            advantages_N[part], returns_N[part] = gae(
                row.rewards_N[part],
                values_N[part],
                row.action_N[part],
                discount=self._gae_config.gamma,
                trace=self._gae_config.lam,
            )
            start += length
        return advantages_N, returns_N


def moments(parts: Sequence[Tensor]) -> tuple[float, float, float]:
    """Count, mean and population variance of the numbers of all ranks, each with any number of tensors.  Collective.

    The variance takes a second pass, so that it does not come out of a difference of large sums.
    """
    numbers = torch.cat([torch.zeros(0, device=device()), *parts]).double()
    count, total = all_reduced([torch.tensor(float(len(numbers))), numbers.sum()])
    mean = total / max(count, 1.0)
    (squares,) = all_reduced([(numbers - mean).square().sum()])
    return count, mean, squares / max(count, 1.0)
