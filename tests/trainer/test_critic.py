"""The critic: what it starts from, what it makes of rewards, its loss and its gradient, and what leaves the policy alone."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

from slipstream.core import schema
from slipstream.core.metrics import values
from slipstream.core.records import Steps, TrainBatch, TrainSample, WeightVersion
from slipstream.trainer.critic import load_critic, moments
from slipstream.trainer.learner import Learner

pytestmark = [pytest.mark.learner, pytest.mark.usefixtures("alone")]
Build = Callable[..., schema.Recipe]


def make(recipe: schema.Recipe, critic: Path | None = None) -> Learner:
    learner = Learner(recipe, Path(recipe.model.path), 0, 1)
    learner.begin_phase(schema.Optimizer(lr=1e-3), 100)
    learner.set_critic(critic)
    return learner


def ppo(**critic: Any) -> dict[str, Any]:
    return {"name": "ppo", "gae": {"lam": 1.0, "whiten": False}, "critic": {"optimizer": {"lr": 1e-3}, **critic}}


def samples(scores: Sequence[float], *, length: int = 4, seed: int = 0) -> list[TrainSample]:
    """One response of ``length`` tokens for each score, which falls on its last token."""
    rng = random.Random(seed)
    return [
        TrainSample(
            sample_id=str(i),
            input_ids=tuple(rng.randrange(64) for _ in range(3 + length)),
            prompt_length=3,
            rl=(1.0,) * length,
            ce=(0.0,) * length,
            distill=(0.0,) * length,
            advantages=(math.nan,) * length,  # the critic's take their place
            behaviour_logprobs=(-4.0,) * length,
            lag=(0,) * length,
            steps=Steps(rewards=(*[0.0] * (length - 1), score), actions=(True,) * length),
        )
        for i, score in enumerate(scores)
    ]


def batch_of(drawn: Sequence[TrainSample], number: int = 0) -> TrainBatch:
    return TrainBatch(
        version=WeightVersion(0, number),
        minibatches=(tuple(drawn),),
        rl_denominators=(float(sum(w != 0 for s in drawn for w in s.rl)),),
        ce_denominators=(0.0,),
        distill_denominators=(0.0,),
    )


def replaced(sample: TrainSample, **changes: object) -> TrainSample:
    fields = {name: getattr(sample, name) for name in TrainSample.__dataclass_fields__}
    return TrainSample(**{**fields, **changes})


def weights_of(module: Any) -> dict[str, Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_metrics_of_a_first_batch_by_hand(recipe: Build) -> None:
    """The value head starts at zero, so V = 0 and, with γ = λ = 1, every token's return is its response's score: 1, 1, 1, 0.

    Loss: mean of R² / 2 = 3/8; explained variance 0; the policy loss is −mean A = −3/4 as u = 1 and w = 1.
    """
    learner = make(recipe(algo=ppo()))
    drawn = samples([1, 1, 1, 0])
    known = learner.logprobs(drawn, "policy")
    drawn = [replaced(s, behaviour_logprobs=tuple(k)) for s, k in zip(drawn, known, strict=True)]
    metrics = values(learner.train(batch_of(drawn)))
    assert metrics["critic/loss"] == pytest.approx(0.375)
    assert metrics["critic/value_mean"] == 0.0 and metrics["critic/explained_variance"] == 0.0
    assert metrics["critic/clip_frac"] == 0.0 and metrics["critic/lr"] == 1e-3 and metrics["critic/grad_norm"] > 0
    assert metrics["loss/policy"] == pytest.approx(-0.75, rel=1e-5)
    for _ in range(60):
        metrics = values(learner.train(batch_of(drawn)))
    assert metrics["critic/explained_variance"] > 0.8, "scores that the critic has seen often enough"


def test_whitened_advantages_have_mean_0_and_deviation_1_over_trained_tokens(recipe: Build) -> None:
    """Returns of 1, 1, 1, 0 over 4 tokens each: mean 3/4, deviation √(3/16); three tokens of the last response are stale.

    Then 12 tokens of 1 and one of 0: mean 12/13, deviation √12 / 13, so advantages 1/√12 and −√12.
    """
    built = recipe(algo={**ppo(), "gae": {"lam": 1.0}})
    learner = make(built)
    drawn = samples([1, 1, 1, 0])
    drawn[3] = replaced(drawn[3], rl=(0.0, 0.0, 0.0, 1.0))
    minibatches = learner._minibatches(batch_of(drawn), 1)
    assert learner.critic is not None
    learner.critic.appraise(minibatches)
    (row,) = minibatches[0].rows
    found = row.advantages_N[row.rl_N != 0].tolist()
    assert sorted(found) == pytest.approx([-math.sqrt(12)] + [1 / math.sqrt(12)] * 12, rel=1e-4)


def test_observations_are_no_steps_and_stale_tokens_pass_credit_on(recipe: Build) -> None:
    """Tokens: own (stale), observed, own, with rewards 0.5, 0, 1.  V = 0, γ = 0.5, λ = 1: returns 0.5 + 0.5 · 1 = 1, –, 1.

    The loss is over the last token alone: 1/2.
    """
    learner = make(recipe(algo={**ppo(), "gae": {"lam": 1.0, "gamma": 0.5, "whiten": False}}))
    (drawn,) = samples([1.0], length=3)
    drawn = replaced(drawn, rl=(0.0, 0.0, 1.0), steps=Steps(rewards=(0.5, 0.0, 1.0), actions=(True, False, True)))
    minibatches = learner._minibatches(batch_of([drawn]), 1)
    assert learner.critic is not None
    learner.critic.appraise(minibatches)
    (fixed,) = minibatches[0].anchors
    assert fixed.returns_N is not None and fixed.returns_N.tolist() == [1.0, 0.0, 1.0]
    assert values(learner.train(batch_of([drawn])))["critic/loss"] == pytest.approx(0.5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_starts_from_the_policy_of_that_moment(recipe: Build, stage: int) -> None:
    """After a step of the policy, so from no folder; later the two go their own ways."""
    built = recipe(algo=ppo(), trainer={"zero_stage": stage})
    learner = Learner(built, Path(built.model.path), 0, 1)
    learner.begin_phase(schema.Optimizer(lr=1e-2), 100)
    demonstrations = [replaced(s, ce=(1.0,) * 4, rl=(0.0,) * 4) for s in samples([0, 0])]
    supervised = TrainBatch(
        version=WeightVersion(0, 0),
        minibatches=(tuple(demonstrations),),
        rl_denominators=(0.0,),
        ce_denominators=(8.0,),
        distill_denominators=(0.0,),
    )
    first = weights_of(learner.policy)
    learner.train(supervised)
    learner.set_critic()
    assert learner.critic is not None
    critic, policy = weights_of(learner.critic.module), weights_of(learner.policy)
    assert not same(first, policy)
    assert critic.keys() - policy.keys() == {"score.weight", "score.bias"} and policy.keys() - critic.keys() == {
        "lm_head.weight"
    }
    assert all(torch.equal(critic[name], policy[name]) for name in critic.keys() & policy.keys())
    assert not critic["score.weight"].any() and not critic["score.bias"].any()
    learner.train(batch_of(samples([1, 0])))
    assert not torch.equal(weights_of(learner.critic.module)["score.weight"], critic["score.weight"])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_warm_up_trains_the_critic_alone(recipe: Build, stage: int) -> None:
    """Two batches of it, by the batch's number, which a resume continues; then the policy's schedule begins at its start."""
    learner = make(recipe(algo=ppo(warmup_batches=2), trainer={"zero_stage": stage}))
    assert learner.critic is not None
    before, values_before = weights_of(learner.policy), weights_of(learner.critic.module)
    for number in range(2):
        metrics = values(learner.train(batch_of(samples([1, 0]), number)))
        assert "loss/policy" not in metrics and "critic/loss" in metrics and metrics["time/train_tokens"] == 14
    assert same(before, weights_of(learner.policy)) and learner.adamw.steps == 0
    assert not same(values_before, weights_of(learner.critic.module)) and learner.critic.adamw.steps == 2
    metrics = values(learner.train(batch_of(samples([1, 0]), 2)))
    assert "loss/policy" in metrics and not same(before, weights_of(learner.policy))
    assert (learner.adamw.steps, learner.critic.adamw.steps) == (1, 3)


def test_a_batch_without_a_fresh_token_moves_neither(recipe: Build) -> None:
    learner = make(recipe(algo=ppo()))
    assert learner.critic is not None
    learner.train(batch_of(samples([1, 0])))
    before = weights_of(learner.policy), weights_of(learner.critic.module)
    metrics = values(learner.train(batch_of([replaced(s, rl=(0.0,) * 4) for s in samples([1, 0])])))
    assert same(before[0], weights_of(learner.policy)) and same(before[1], weights_of(learner.critic.module))
    assert not any(name.startswith("critic/") for name in metrics)


def test_a_rejected_token_trains_the_critic_no_more_than_the_policy(recipe: Build) -> None:
    """The second response is far off-policy, and rejected: the critic's loss is that of the first, R² / 2 = 1/2."""
    learner = make(recipe(algo={**ppo(), "correction": {"reject": ["icepop"]}}))
    drawn = samples([1, 3])
    known = learner.logprobs(drawn, "policy")
    drawn = [
        replaced(s, behaviour_logprobs=tuple(v - math.log(r) for v in k)) for s, k, r in zip(drawn, known, (1, 50), strict=True)
    ]
    metrics = values(learner.train(batch_of(drawn)))
    assert metrics["critic/loss"] == pytest.approx(0.5) and metrics["offpolicy/masked_frac"] == pytest.approx(0.5)


def test_rewards_that_are_not_finite_stop_before_any_update(recipe: Build) -> None:
    learner = make(recipe(algo=ppo()))
    assert learner.critic is not None
    before = weights_of(learner.policy), weights_of(learner.critic.module)
    with pytest.raises(FloatingPointError, match=r"batch 0\.0, epoch 0, mini-batch 0: the critic's loss is nan"):
        learner.train(batch_of(samples([1, math.nan])))
    assert same(before[0], weights_of(learner.policy)) and same(before[1], weights_of(learner.critic.module))


def test_values_have_no_dropout_and_do_not_see_their_neighbours_in_a_row(recipe: Build, tiny: Path, tmp_path: Path) -> None:
    folder = saved_critic(tiny, tmp_path / "critic")
    learner = make(recipe(algo=ppo()), folder)
    drawn = samples([1, 0, 1])

    def appraised(parts: Sequence[Sequence[TrainSample]]) -> list[list[float]]:
        found: list[list[float]] = []
        for part in parts:
            minibatches = learner._minibatches(batch_of(part), 1)
            assert learner.critic is not None
            learner.critic.appraise(minibatches)
            fixed = minibatches[0].anchors[0]
            assert fixed.values_N is not None
            found += minibatches[0].rows[0].unpack(fixed.values_N)
        return found

    together, alone = appraised([drawn]), appraised([[s] for s in drawn])
    assert together == appraised([drawn]), "the same in every pass"
    for a, b in zip(together, alone, strict=True):
        assert a == pytest.approx(b, abs=1e-4) and max(map(abs, a)) > 1e-3


def saved_critic(model: Path, folder: Path) -> Path:
    """A critic's folder with a head that is not zero."""
    critic = load_critic(model, schema.Model(path=str(model)))
    with torch.no_grad():
        critic.score.weight.normal_(generator=torch.Generator().manual_seed(1))
        critic.score.bias.fill_(0.25)
    critic.save_pretrained(folder)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def test_a_folder_of_a_critic_keeps_its_head(tiny: Path, tmp_path: Path) -> None:
    folder = saved_critic(tiny, tmp_path / "critic")
    again = load_critic(folder, schema.Model(path=str(folder)))
    assert again.score.bias.item() == 0.25 and again.score.weight.abs().max() > 1


def test_folders_that_cannot_be_a_critic(tiny: Path, tmp_path: Path) -> None:
    folder = saved_critic(tiny, tmp_path / "two")
    from transformers import AutoModelForTokenClassification

    AutoModelForTokenClassification.from_pretrained(tiny, num_labels=2).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"algo\.critic\.path: .*two lacks 2 tensors .*score\.bias, score\.weight"):
        load_critic(folder, schema.Model(path=str(folder)))
    other = shutil.copytree(tiny, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ValueError, match=r"algo\.critic\.path: .*other is a mamba, for which transformers has no token"):
        load_critic(other, schema.Model(path=str(other)))
    deeper = shutil.copytree(tiny, tmp_path / "deeper")
    (deeper / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}))
    with pytest.raises(ValueError, match=r"deeper lacks 11 tensors in the shape that a critic needs \(model\.layers\.2"):
        load_critic(deeper, schema.Model(path=str(deeper)))


def test_moments_by_hand_and_of_nothing() -> None:
    """1, 2, 3, 6 in two tensors: mean 3, squares 4 + 1 + 0 + 9, variance 14/4; far from zero they are as exact."""
    assert moments([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]) == (4.0, 3.0, 3.5)
    assert moments([torch.tensor([1e8, 1e8 + 8])]) == (2.0, 1e8 + 4, 16.0)
    assert moments([]) == (0.0, 0.0, 0.0)
