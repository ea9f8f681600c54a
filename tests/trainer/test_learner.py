"""The learner on one rank: metrics with known values, refusals, and what must not change weights."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import deepspeed
import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.core import schema
from slipstream.core.metrics import Max, Mean, Sum, values
from slipstream.core.records import TrainBatch, TrainSample, WeightVersion
from slipstream.core.weights import TensorSpec, check_bucket
from slipstream.trainer.learner import Learner
from slipstream.trainer.model import load_policy, resolve_model

pytestmark = [pytest.mark.learner, pytest.mark.usefixtures("alone")]
Build = Callable[..., schema.Recipe]
STAGES = (0, 1, 2, 3)


def make(recipe: schema.Recipe, lr: float = 1e-3) -> Learner:
    learner = Learner(recipe, Path(recipe.model.path), 0, 1)
    learner.begin_phase(schema.Optimizer(lr=lr), 100)
    return learner


def samples(count: int = 6, *, rl: float = 1.0, ce: float = 0.0, distill: float = 0.0, seed: int = 0) -> list[TrainSample]:
    rng = random.Random(seed)
    made = []
    for i in range(count):
        prompt, length = rng.randint(1, 8), rng.randint(2, 12)
        made.append(
            TrainSample(
                sample_id=str(i),
                input_ids=tuple(rng.randrange(64) for _ in range(prompt + length)),
                prompt_length=prompt,
                rl=(rl,) * length,
                ce=(ce,) * length,
                distill=(distill,) * length,
                advantages=(rng.choice((-1.0, 1.0)),) * length,
                behaviour_logprobs=(-4.0,) * length,
                lag=(0,) * length,
            )
        )
    return made


def batch_of(parts: Sequence[Sequence[TrainSample]]) -> TrainBatch:
    def denominator(part: Sequence[TrainSample], stream: str) -> float:
        return float(sum(w != 0 for s in part for w in getattr(s, stream)))

    return TrainBatch(
        version=WeightVersion(0, 4),
        minibatches=tuple(tuple(part) for part in parts),
        rl_denominators=tuple(denominator(part, "rl") for part in parts),
        ce_denominators=tuple(denominator(part, "ce") for part in parts),
        distill_denominators=tuple(denominator(part, "distill") for part in parts),
    )


def replaced(sample: TrainSample, **changes: object) -> TrainSample:
    fields = {name: getattr(sample, name) for name in TrainSample.__dataclass_fields__}
    return TrainSample(**{**fields, **changes})


def weights_of(learner: Learner) -> dict[str, Tensor]:
    found = {}
    for name, parameter in learner.policy.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_metrics_of_a_batch_whose_sampler_was_half_as_sure(recipe: Build) -> None:
    """Behaviour log-probs = the policy's − log 2 on every token, so π_prox / π_b = 2 throughout: truncated to 1.5, ess 1, k1
    estimate of KL(π_b ‖ π_prox) = −log 2.  On the first inner step the policy loss is −Σ 1.5 · A / n."""
    learner = make(recipe(algo={"correction": {"cap": 1.5}}, rollout={"sampling": {"temperature": 0.5}}))
    drawn = samples()
    logprobs = learner.logprobs(drawn, "policy")
    drawn = [
        replaced(s, behaviour_logprobs=tuple(v - math.log(2) for v in known)) for s, known in zip(drawn, logprobs, strict=True)
    ]
    tokens = sum(len(s.rl) for s in drawn)
    metrics = learner.train(batch_of([drawn]))
    flat = values(metrics)
    advantage = sum(sum(s.advantages) for s in drawn) / tokens
    assert flat["loss/policy"] == pytest.approx(-1.5 * advantage, rel=1e-5)
    assert flat["offpolicy/ratio_mean"] == pytest.approx(2.0, rel=1e-5)
    assert flat["offpolicy/ratio_max"] == pytest.approx(2.0, rel=1e-5)
    assert flat["offpolicy/ratio_truncated_mean"] == pytest.approx(1.5)
    assert flat["offpolicy/ess"] == pytest.approx(1.0)
    assert flat["offpolicy/sampler_kl"] == pytest.approx(-math.log(2), rel=1e-4)
    assert flat["offpolicy/inner_step"] == 0.0
    assert flat["offpolicy/clip_frac"] == 0.0
    assert flat["optim/lr"] == 1e-3
    assert flat["loss/grad_norm"] > 0
    assert metrics["offpolicy/ratio_mean"] == Mean(pytest.approx(2.0), tokens)
    assert isinstance(metrics["offpolicy/ratio_max"], Max)
    assert metrics["time/train_tokens"] == Sum(sum(len(s.input_ids) for s in drawn))
    assert "loss/ce" not in flat
    assert "kl/ref" not in flat


def test_ess_of_unequal_ratios(recipe: Build) -> None:
    """Ratios 1, 1, 2 and 4 (caps do not touch it): (Σr)² / (n Σr²) = 64 / (4 · 22)."""
    learner = make(recipe())
    (drawn,) = samples(1)
    drawn = replaced(
        drawn, input_ids=(*drawn.input_ids[:1], 4, 5, 6, 7), prompt_length=1, rl=(1.0,) * 4, ce=(0.0,) * 4,
        distill=(0.0,) * 4, advantages=(1.0,) * 4, behaviour_logprobs=(0.0,) * 4, lag=(0,) * 4,
    )  # fmt: skip
    (known,) = learner.logprobs([drawn], "policy")
    drawn = replaced(drawn, behaviour_logprobs=tuple(v - math.log(r) for v, r in zip(known, (1, 1, 2, 4), strict=True)))
    metrics = values(learner.train(batch_of([[drawn]])))
    assert metrics["offpolicy/ess"] == pytest.approx(64 / 88, rel=1e-4)
    assert metrics["offpolicy/ratio_max"] == pytest.approx(4.0, rel=1e-4)


def test_the_streams_alone_and_together(recipe: Build) -> None:
    """Cross-entropy at temperature 1 whatever the sampling temperature; an empty stream (denominator 0) is left out."""
    learner = make(recipe(rollout={"sampling": {"temperature": 0.5}}), lr=1e-9)
    demonstrations = samples(rl=0.0, ce=1.0)
    with torch.no_grad():
        nll = -torch.cat([full_logprobs(learner, s) for s in demonstrations]).mean().item()
    metrics = values(learner.train(batch_of([demonstrations])))
    assert metrics["loss/ce"] == pytest.approx(nll, rel=1e-5)
    assert not any(name.startswith("offpolicy/") or name == "loss/policy" for name in metrics)
    both = values(learner.train(batch_of([[*demonstrations, *samples(rl=1.0)]])))
    assert both["loss/ce"] == pytest.approx(nll, rel=1e-4)
    assert "loss/policy" in both


def full_logprobs(learner: Learner, sample: TrainSample) -> Tensor:
    logits = learner.policy(input_ids=torch.tensor([sample.input_ids])).logits[0, sample.prompt_length - 1 : -1]
    targets = torch.tensor(sample.input_ids[sample.prompt_length :])
    return torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]


def test_weight_zero_leaves_a_token_out_whatever_it_holds(recipe: Build) -> None:
    """A stale token with NaN advantage and an impossible behaviour log-prob changes neither loss nor update."""
    clean = samples()
    poisoned = [
        replaced(
            s,
            rl=(0.0, *s.rl[1:]),
            advantages=(math.nan, *s.advantages[1:]),
            behaviour_logprobs=(-math.inf, *s.behaviour_logprobs[1:]),
        )
        for s in clean
    ]
    plain = [replaced(s, rl=(0.0, *s.rl[1:])) for s in clean]
    results = []
    for drawn in (plain, poisoned):
        learner = make(recipe())
        metrics = values(learner.train(batch_of([drawn])))
        results.append((metrics, weights_of(learner)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_is_not_finite_stops_before_the_update(recipe: Build, stage: int) -> None:
    learner = make(recipe(trainer={"zero_stage": stage}))
    before = weights_of(learner)
    bad = [replaced(s, advantages=(math.nan,) * len(s.rl)) for s in samples()]
    with pytest.raises(FloatingPointError, match=r"batch 0\.4, epoch 0, mini-batch 0: loss is not finite \(policy nan"):
        learner.train(batch_of([bad]))
    assert same(before, weights_of(learner))


@pytest.mark.parametrize(("stage", "dtype"), [*((s, "float32") for s in STAGES), *((s, "bfloat16") for s in (1, 2, 3))])
def test_a_gradient_that_is_not_finite_stops_before_the_update(recipe: Build, tiny: Path, stage: int, dtype: str) -> None:
    """The loss is fine and one gradient is infinite: what an overflow in the backward pass looks like."""
    learner = make(recipe(trainer={"zero_stage": stage}, model={"path": str(tiny), "dtype": dtype}))
    before = weights_of(learner)
    learner.policy.model.norm.register_full_backward_hook(lambda module, into, out: (into[0] * math.inf,))
    with pytest.raises(FloatingPointError, match=r"batch 0\.4, epoch 0, mini-batch 0: gradient norm is (inf|nan|-1)"):
        learner.train(batch_of([samples()]))
    assert same(before, weights_of(learner))


@pytest.mark.parametrize("stage", STAGES)
def test_begin_phase_forgets_the_optimizer_and_keeps_the_weights(recipe: Build, stage: int) -> None:
    learner = make(recipe(trainer={"zero_stage": stage}))
    learner.train(batch_of([samples()]))
    assert learner.adamw.steps == 1
    before = weights_of(learner)
    learner.begin_phase(schema.Optimizer(lr=0.5, schedule="linear", warmup_steps=2, max_grad_norm=None), 10)
    assert same(before, weights_of(learner))
    assert learner.adamw.steps == 0
    for parameter in learner.policy.parameters():
        assert not learner.adamw.gather(parameter, "exp_avg").any()
        assert not learner.adamw.gather(parameter, "exp_avg_sq").any()
    assert values(learner.train(batch_of([samples()])))["optim/lr"] == 0.25


def test_the_reference_stays_while_the_policy_moves(recipe: Build) -> None:
    learner = make(recipe(algo={"kl": {"coefficient": 0.5}, "epochs": 2}))
    drawn = samples()
    learner.set_reference()
    before = learner.logprobs(drawn, "reference")
    assert before == learner.logprobs(drawn, "policy")
    first = values(learner.train(batch_of([drawn])))
    assert learner.logprobs(drawn, "reference") == before
    assert learner.logprobs(drawn, "policy") != before
    assert first["kl/ref"] > 0, "the mean of two inner steps, of which the first starts at 0"
    assert first["offpolicy/inner_step"] > 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_refreshed_reference_is_the_policy_of_that_moment(recipe: Build, tmp_path: Path, stage: int) -> None:
    """It follows the policy when asked, stays behind at the next step, and is what a checkpoint brings back."""
    built = recipe(algo={"kl": {"coefficient": 0.5, "refresh_every": 1}}, trainer={"zero_stage": stage})
    learner, drawn = make(built), samples()
    learner.set_reference()
    first = learner.logprobs(drawn, "reference")
    learner.train(batch_of([drawn]))
    learner.set_reference()
    refreshed = learner.logprobs(drawn, "reference")
    assert refreshed == learner.logprobs(drawn, "policy") != first
    learner.train(batch_of([drawn]))
    assert learner.logprobs(drawn, "reference") == refreshed
    learner.save(tmp_path / "saved")
    again = make(built)
    again.load(tmp_path / "saved")
    assert again.logprobs(drawn, "reference") == refreshed


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_brings_back_a_reference_of_another_architecture(
    recipe: Build, tiny: Path, tmp_path: Path, stage: int
) -> None:
    """Same tensors, other positions: under the policy's config it would be another model."""
    other = shutil.copytree(tiny, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 100.0
    (other / "config.json").write_text(json.dumps(config))
    built = recipe(algo={"kl": {"coefficient": 0.5}}, trainer={"zero_stage": stage})
    learner, drawn = make(built), samples()
    learner.set_reference(other)
    before = learner.logprobs(drawn, "reference")
    assert before != learner.logprobs(drawn, "policy")
    learner.save(tmp_path / "saved")
    again = make(built)
    again.load(tmp_path / "saved")
    assert again.logprobs(drawn, "reference") == before


def shifted(learner: Learner, drawn: Sequence[TrainSample], ratios: Sequence[float]) -> list[TrainSample]:
    """The samples with π_prox / π_b = ``ratios``, one for each sample."""
    known = learner.logprobs(drawn, "policy")
    behaviours = [tuple(v - math.log(r) for v in values) for values, r in zip(known, ratios, strict=True)]
    return [replaced(s, behaviour_logprobs=b) for s, b in zip(drawn, behaviours, strict=True)]


def test_rejected_tokens_leave_loss_and_denominator_and_are_counted(recipe: Build) -> None:
    """Ratios of 1 in four samples, 9 and 0.1 in the last two, which the band of 0.5 to 5 rejects: the update is that of the
    four alone, and the metrics know of all six."""
    outlying = recipe(algo={"correction": {"reject": ["icepop"]}})
    learner, alone = make(outlying), make(recipe())
    drawn = shifted(learner, samples(), [1, 1, 1, 1, 9, 0.1])
    metrics = values(learner.train(batch_of([drawn])))
    expected = values(alone.train(batch_of([drawn[:4]])))
    for name in ("loss/policy", "loss/grad_norm", "loss/entropy"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5)
    for mine, other in zip(learner.policy.parameters(), alone.policy.parameters(), strict=True):  # 0.1 × the gradient
        found, wanted = learner.adamw.gather(mine, "exp_avg"), alone.adamw.gather(other, "exp_avg")
        assert (found - wanted).norm() < 1e-5 * wanted.norm()
    lengths = [len(s.rl) for s in drawn]
    assert metrics["offpolicy/masked_frac"] == pytest.approx(sum(lengths[4:]) / sum(lengths))
    assert metrics["offpolicy/ratio_max"] == pytest.approx(9, rel=1e-4)
    assert expected["offpolicy/masked_frac"] == 0.0


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_a_batch_that_is_rejected_throughout_makes_no_step_and_is_still_measured(recipe: Build, reduction: str) -> None:
    learner = make(recipe(algo={"correction": {"reject": ["geometric"]}, "reduction": reduction}))
    learner.train(batch_of([shifted(learner, samples(), [1] * 6)]))
    before = weights_of(learner)
    metrics = values(learner.train(batch_of([shifted(learner, samples(), [9] * 6)])))
    assert same(before, weights_of(learner)) and learner.adamw.steps == 1
    assert metrics["offpolicy/masked_frac"] == 1.0 and metrics["offpolicy/ratio_mean"] == pytest.approx(9, rel=1e-4)


def test_early_stop_counts_the_step_that_saw_it_as_the_last(recipe: Build) -> None:
    """Four steps of a learning rate of 1e-2: the second finds the policy moved, takes its step, and the batch ends."""
    algo = {"epochs": 4, "max_inner_kl": 1e-4}
    learner, drawn = make(recipe(algo=algo), lr=1e-2), samples()
    metrics = values(learner.train(batch_of([drawn])))
    assert learner.adamw.steps == 2 and metrics["offpolicy/early_stops"] == 1
    assert metrics["offpolicy/inner_kl"] > 1e-4
    patient = make(recipe(algo={**algo, "max_inner_kl": 100.0}), lr=1e-2)
    assert values(patient.train(batch_of([drawn])))["offpolicy/early_stops"] == 0 and patient.adamw.steps == 4


@pytest.mark.parametrize(
    ("algo", "forwards"),
    [
        ({}, 0),
        ({"name": "gspo"}, 0),
        ({"epochs": 2}, 1),
        ({"epochs": 2, "proximal": "loglinear"}, 0),
        ({"correction": {"reject": ["opsm"]}}, 1),
    ],
)
def test_which_settings_cost_a_forward_pass(recipe: Build, monkeypatch: pytest.MonkeyPatch, algo: dict, forwards: int) -> None:
    learner = make(recipe(algo=algo))
    seen: list[int] = []
    scored = learner._logprobs
    monkeypatch.setattr(learner, "_logprobs", lambda *a: seen.append(1) or scored(*a))
    learner.train(batch_of([samples()]))
    assert len(seen) == forwards


@pytest.mark.parametrize("stage", [0, 3])
def test_a_teacher_teaches_and_its_equal_does_not(recipe: Build, tiny: Path, tmp_path: Path, stage: int) -> None:
    """Teacher = student: loss below 1e-6, gradient below 1e-5.  Another teacher: the loss is 0.5 · the mean KL of full
    softmaxes, w = 1 since π_b is the policy, and steps towards it lower the KL.  The teacher itself never moves."""
    other = resolve_model(schema.Model(path="builtin:tiny"), 5, tmp_path)
    built = recipe(
        algo={"name": "opd"},
        distill={"teacher": str(tiny), "coefficient": 0.5},
        rollout={"sampling": {"temperature": 0.7}},
        trainer={"zero_stage": stage, "max_tokens_per_microbatch": 24},
    )
    learner = make(built)
    drawn = samples(rl=0.0, distill=1.0)
    drawn = [
        replaced(s, behaviour_logprobs=tuple(known)) for s, known in zip(drawn, learner.logprobs(drawn, "policy"), strict=True)
    ]
    learner.set_teacher(tiny)
    equal = values(learner.train(batch_of([drawn])))
    assert abs(equal["loss/distill"]) < 1e-6 and equal["distill/kl"] < 1e-6 and equal["loss/grad_norm"] < 1e-5

    learner = make(built)
    learner.set_teacher(other)
    known = learner.logprobs(drawn, "teacher")
    expected = mean_kl(tiny, other, [(s.input_ids, s.prompt_length) for s in drawn], temperature=0.7)
    first = values(learner.train(batch_of([drawn])))
    assert first["distill/kl"] == pytest.approx(expected, rel=1e-4)
    assert first["loss/distill"] == pytest.approx(0.5 * expected, rel=1e-4)
    assert first["offpolicy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert "loss/policy" not in first and "offpolicy/clip_frac" not in first
    for _ in range(4):
        last = values(learner.train(batch_of([drawn])))
    assert last["distill/kl"] < 0.8 * first["distill/kl"]
    assert learner.logprobs(drawn, "teacher") == known


def mean_kl(student: Path, teacher: Path, sequences: list[tuple[tuple[int, ...], int]], temperature: float) -> float:
    """Over all response tokens, one sequence at a time, from whole softmaxes."""
    models = [load_policy(path, schema.Model(path=str(path))) for path in (student, teacher)]
    found: list[float] = []
    with torch.no_grad():
        for ids, prompt in sequences:
            ours, theirs = (
                (m(input_ids=torch.tensor([ids])).logits[0, prompt - 1 : -1] / temperature).log_softmax(-1) for m in models
            )
            found += (ours.exp() * (ours - theirs)).sum(-1).tolist()
    return math.fsum(found) / len(found)


def test_a_warm_start_needs_no_reference_and_one_pass(recipe: Build) -> None:
    """The RL phase has a KL term and two epochs; the supervised batches before it have neither."""
    learner = make(recipe(algo={"kl": {"coefficient": 0.5}, "epochs": 2}))
    learner.begin_phase(schema.Optimizer(lr=1e-3), 10, epochs=1)
    drawn = samples(rl=0.0, ce=1.0)
    metrics = learner.train(batch_of([drawn]))
    assert learner.adamw.steps == 1
    assert metrics["time/train_tokens"] == Sum(sum(len(s.input_ids) for s in drawn))
    assert "kl/ref" not in metrics


def test_a_batch_without_any_weight_makes_no_step(recipe: Build) -> None:
    """After a step Adam has momentum; a batch of stale tokens only must not let it move the weights."""
    learner = make(recipe())
    learner.train(batch_of([samples()]))
    before = weights_of(learner)
    metrics = learner.train(batch_of([samples(rl=0.0)]))
    assert same(before, weights_of(learner))
    assert learner.adamw.steps == 1
    assert metrics == {"time/train_tokens": Sum(0)}


def test_bfloat16_needs_a_zero_stage_with_float32_weights(recipe: Build, tiny: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.zero_stage: got 0 with model\.dtype bfloat16, expected 1, 2 or 3"):
        make(recipe(model={"path": str(tiny), "dtype": "bfloat16"}))


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (3, "float32"), (3, "bfloat16")])
def test_published_bytes_are_the_weights(recipe: Build, tiny: Path, stage: int, dtype: str) -> None:
    """After a step, every tensor cut out of the buckets equals the parameter it is named after; each comes once."""
    learner = make(recipe(trainer={"zero_stage": stage}, model={"path": str(tiny), "dtype": dtype}))
    learner.train(batch_of([samples()]))
    expected = weights_of(learner)
    limit = 100_000
    found: dict[str, Tensor] = {}
    shipped = list(learner.buckets(limit))
    assert len(shipped) > 5
    for number, (bucket, data, crc) in enumerate(shipped):
        assert bucket.index == number
        assert bucket.nbytes <= limit or len(bucket.tensors) == 1
        assert isinstance(data, np.ndarray)
        assert data.dtype == np.uint8
        check_bucket(bucket, data, crc)
        for spec, (start, end) in zip(bucket.tensors, bucket.offsets(), strict=True):
            assert spec.dtype == dtype
            assert spec.name not in found
            raw = torch.from_numpy(data[start:end].copy()).view(getattr(torch, dtype))
            found[spec.name] = raw.view(spec.shape)
    assert found.keys() == expected.keys()
    assert same(found, expected)


def test_specs_are_the_names_and_shapes_of_the_folder(tiny: Path, recipe: Build) -> None:
    """Under ZeRO-3 too, where a parameter in memory is an empty tensor; and a tied head is not sent twice."""
    from safetensors import safe_open
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from slipstream.trainer.publisher import engine_specs

    learner = make(recipe(trainer={"zero_stage": 3}))
    with safe_open(tiny / "model.safetensors", framework="pt") as file:
        in_folder = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {spec.name: spec.shape for spec in engine_specs(learner.policy)} == in_folder
    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    config = Qwen3Config(vocab_size=16, head_dim=8, tie_word_embeddings=True, **small)
    tied = engine_specs(Qwen3ForCausalLM(config))
    assert tied[0] == TensorSpec("model.embed_tokens.weight", "float32", (16, 8))
    assert "lm_head.weight" not in {spec.name for spec in tied}


def test_fused_experts_are_refused() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from slipstream.trainer.publisher import engine_specs

    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    config = Qwen3MoeConfig(vocab_size=16, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, **small)
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM: 2 of its checkpoint's tensors are renamed or fused"):
        engine_specs(Qwen3MoeForCausalLM(config))
