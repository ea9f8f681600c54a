"""One rank of the oracle test: runs each case through the learner and compares it with the plain loop.

    python oracle_worker.py RANK WORLD_SIZE PORT FOLDER CASES_JSON

Rank 0 prints a line of JSON per case: the largest relative error of log-probs, gradient norm, gradients and parameters.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import deepspeed
import oracle
import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from slipstream.core import schema
from slipstream.core.algorithms import GAE, KL, Band, Correction, Critic
from slipstream.core.optimizer import CriticOptimizer
from slipstream.core.records import TrainBatch
from slipstream.trainer import distributed
from slipstream.trainer.learner import Learner
from slipstream.trainer.optim import ShardedAdamW


def recipe(case: dict[str, Any], folder: Path) -> schema.Recipe:
    epochs, minibatches = case["inner"]
    rule = oracle.RULES[case["rule"]]
    return schema.Recipe(
        name="oracle",
        model=schema.Model(path=str(folder)),
        data=schema.Data(source="builtin:number_sorting"),
        algo=schema.Algo(
            loss=rule.loss,
            clip_low=rule.clip_low,
            clip_high=rule.clip_high,
            dual_clip=oracle.DUAL_CLIP,
            correction=Correction(
                weight=rule.level,
                cap=oracle.CAP,
                reject=["icepop", "geometric", "opsm"] if rule.rejects else [],
                icepop=Band(low=oracle.ICEPOP[0], high=oracle.ICEPOP[1]),
                geometric=Band(low=oracle.GEOMETRIC[0], high=oracle.GEOMETRIC[1]),
                opsm_delta=oracle.OPSM_DELTA,
            ),
            proximal="loglinear" if rule.loglinear else "recompute",
            reduction="sequence_mean" if rule.rejects else "token_mean",  # the weights are recorded: it matters for rejections
            max_inner_kl=rule.max_inner_kl,
            kl=KL(coefficient=oracle.KL_COEFFICIENT, placement="loss", estimator="k3"),
            advantage="gae" if rule.critic else "grpo",
            gae=GAE(gamma=oracle.GAMMA, lam=oracle.LAM) if rule.critic else GAE(),
            critic=Critic(clip=oracle.VALUE_CLIP, optimizer=CRITIC_OPTIMIZER) if rule.critic else None,
            epochs=epochs,
            minibatches=minibatches,
        ),
        schedule=schema.Schedule(steps=oracle.BATCHES),
        distill=schema.Distill(coefficient=oracle.DISTILL_COEFFICIENT),
        rollout=schema.Rollout(sampling=schema.Sampling(temperature=oracle.TEMPERATURE)),
        trainer=schema.Trainer(
            ranks=case["ranks"], zero_stage=case["stage"], max_tokens_per_microbatch=case["tokens"], optimizer=OPTIMIZER
        ),
    )


OPTIMIZER = schema.Optimizer(
    lr=oracle.LR,
    betas=oracle.BETAS,
    eps=oracle.EPS,
    weight_decay=oracle.DECAY,
    max_grad_norm=oracle.MAX_NORM,
    schedule="cosine",
    warmup_steps=oracle.WARMUP,
    min_lr_ratio=oracle.MIN_RATIO,
)


CRITIC_OPTIMIZER = CriticOptimizer.model_validate(
    OPTIMIZER.model_dump()
    | {"lr": oracle.CRITIC_LR, "max_grad_norm": oracle.CRITIC_MAX_NORM, "schedule": "linear", "warmup_steps": 0}
)


def reordered(batch: TrainBatch, order: str) -> TrainBatch:
    """The same batch with the samples of each mini-batch in another order."""
    parts = []
    for samples in batch.minibatches:
        if order == "reversed":
            samples = samples[::-1]
        elif order == "shuffled":
            samples = tuple(random.Random(3).sample(samples, len(samples)))
        parts.append(samples)
    return TrainBatch(
        version=batch.version,
        minibatches=tuple(parts),
        rl_denominators=batch.rl_denominators,
        ce_denominators=batch.ce_denominators,
        distill_denominators=batch.distill_denominators,
    )


def gradients_of(module: torch.nn.Module, prefix: str) -> dict[str, Tensor]:
    return {prefix + name: safe_get_full_grad(p).detach().clone() for name, p in module.named_parameters()}


def parameters_of(module: torch.nn.Module, prefix: str) -> dict[str, Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[prefix + name] = parameter.detach().clone()
    return found


Trained = list[tuple[str, torch.nn.Module, ShardedAdamW]]
"""What is compared: a prefix for the names of its parameters, the model, its optimizer."""


def recorded(trained: Trained) -> tuple[list[dict[str, Tensor]], list[float]]:
    """The gradients and norms of every step to come, in order."""
    seen: list[dict[str, Tensor]] = []
    norms: list[float] = []

    def record(prefix: str, module: torch.nn.Module, adamw: ShardedAdamW) -> None:
        step = adamw.step

        def recording_step(rate: float) -> float:
            seen.append(gradients_of(module, prefix))
            norms.append(step(rate))
            return norms[-1]

        adamw.step = recording_step  # type: ignore[method-assign]

    for what in trained:
        record(*what)
    return seen, norms


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def run(case: dict[str, Any], folder: Path, rank: int, world_size: int) -> tuple[dict[str, float], dict[str, int]]:
    """Largest relative errors over all batches, inner steps and parameters of one case, and the branches its tokens took."""
    model = folder / f"model-{rank}-{'tied' if case['tied'] else 'untied'}"
    epochs, minibatches = case["inner"]
    learner = Learner(recipe(case, model), model, rank, world_size)
    learner.begin_phase(OPTIMIZER, oracle.BATCHES * epochs * minibatches)
    learner.set_reference()
    learner.set_teacher(oracle.teacher_of(model))
    trained: Trained = [("", learner.policy, learner.adamw)]
    rule = oracle.RULES[case["rule"]]
    if rule.critic:
        learner.set_critic(oracle.critic_of(model))
        assert learner.critic is not None
        trained.append(("critic.", learner.critic.module, learner.critic.adamw))
    seen, norms = recorded(trained)
    events: Counter[str] = Counter()
    errors = dict.fromkeys(("logprobs", "norm", "gradients", "parameters"), 0.0)

    def note(kind: str, error: float) -> None:
        errors[kind] = max(errors[kind], error)

    traces = oracle.plain_loop(model, rule, epochs=epochs, minibatches=minibatches)
    for original, expected in zip(oracle.recorded_batches(minibatches, taught=rule.taught), traces, strict=True):
        batch = reordered(original, case["order"])
        for samples, known, given in zip(batch.minibatches, expected.logprobs, original.minibatches, strict=True):
            by_name = {s.sample_id: values for s, values in zip(given, known, strict=True)}
            for sample, got in zip(samples, learner.logprobs(samples, "policy"), strict=True):
                note("logprobs", relative(torch.tensor(got), torch.tensor(by_name[sample.sample_id])))
        events += expected.events
        seen.clear()
        norms.clear()
        learner.train(batch)
        assert len(seen) == len(expected.gradients) <= epochs * minibatches * len(trained)
        for got, want, norm, known_norm in zip(seen, expected.gradients, norms, expected.norms, strict=True):
            note("norm", abs(norm - known_norm) / known_norm)
            for name in want:
                note("gradients", relative(got[name], want[name]))
        for prefix, module, _ in trained:
            for name, value in parameters_of(module, prefix).items():
                note("parameters", relative(value, expected.parameters[name]))
    learner.engine.destroy()
    if learner.critic is not None:
        learner.critic.engine.destroy()
    return errors, dict(events)


def main() -> None:
    rank, world_size, port = (int(a) for a in sys.argv[1:4])
    torch.set_num_threads(1)
    for name in ("tied", "untied"):  # before joining: inside a group, transformers saves on rank 0 only
        folder = Path(sys.argv[4]) / f"model-{rank}-{name}"
        oracle.write_model(folder, tied=name == "tied")
        oracle.write_model(oracle.teacher_of(folder), tied=name == "tied", seed=8)
        oracle.write_critic(folder)
    distributed.join(rank, world_size, "127.0.0.1", port, timeout_s=120)
    for case in json.loads(sys.argv[5]):
        errors, events = run(case, Path(sys.argv[4]), rank, world_size)
        if rank == 0:
            print(json.dumps({"case": case, "errors": errors, "events": events}), flush=True)
    distributed.leave()


if __name__ == "__main__":
    main()
