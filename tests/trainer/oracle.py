"""The plain loop that the learner must equal: one process, one sequence at a time, every formula written out again.

Imports nothing of Slipstream but the records.  No autograd of losses either: the derivative of each token's loss with
respect to its log-probability is written by hand, and only the model is differentiated by torch.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForTokenClassification,
)

from slipstream.core.records import Steps, TrainBatch, TrainSample, WeightVersion

VOCABULARY = 32
TEMPERATURE = 0.7
CLIP_LOW, CLIP_HIGH, DUAL_CLIP, CAP = 0.2, 0.3, 1.5, 2.0
KL_COEFFICIENT, DISTILL_COEFFICIENT = 0.1, 0.5
ICEPOP, GEOMETRIC, OPSM_DELTA = (0.1, 9.0), (0.3, 3.0), 0.3
GAMMA, LAM, VALUE_CLIP, CRITIC_LR, CRITIC_MAX_NORM = 0.95, 0.8, 0.05, 2e-3, 4.0
LR, BETAS, EPS, DECAY, MAX_NORM = 2e-3, (0.9, 0.95), 1e-4, 0.1, 0.5
WARMUP, MIN_RATIO = 2, 0.1
BATCHES = 5


@dataclass(frozen=True)
class Rule:
    """What is trained: the loss, the level of the behaviour weight, and what is done about off-policy tokens."""

    loss: str = "clipped_surrogate"
    level: str = "token"
    clip_low: float = CLIP_LOW
    clip_high: float = CLIP_HIGH
    rejects: bool = False
    loglinear: bool = False
    max_inner_kl: float | None = None
    taught: bool = False
    critic: bool = False


RULES = {
    "grpo": Rule(),
    "gspo": Rule(loss="gspo", level="geometric", clip_low=0.02, clip_high=0.02, max_inner_kl=0.03),
    "rejecting": Rule(loss="dppo_tv", level="sequence", clip_low=0.01, clip_high=0.01, rejects=True),
    "loglinear": Rule(loss="cispo", loglinear=True, max_inner_kl=1.7),
    "taught": Rule(taught=True),
    "ppo": Rule(critic=True, max_inner_kl=100.0),
}


def write_model(folder: Path, *, tied: bool, seed: int = 7) -> None:
    """A model of 15 thousand parameters, enough for every kind of layer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def write_critic(folder: Path) -> None:
    """A value model of the same shape, with a head that is not zero."""
    torch.manual_seed(9)
    config = Qwen3Config.from_pretrained(folder, num_labels=1, tie_word_embeddings=False)
    Qwen3ForTokenClassification(config).save_pretrained(critic_of(folder))


def recorded_batches(minibatches: int, *, taught: bool) -> list[TrainBatch]:
    """Fixed trajectories: lengths 3 to 24, some tokens stale (weight 0, with absurd values that must not matter), some of the
    rest far off-policy (above the cap), one sample in four with cross-entropy, one of those with both streams.  If ``taught``,
    the tokens of RL weight of every other sample have a weight in the distillation stream, and those of sample 2 in it only."""
    rng = random.Random(11)
    batches = []
    for number in range(BATCHES):
        parts = [tuple(_sample(rng, f"{number}/{part}/{i}", taught) for i in range(8)) for part in range(minibatches)]
        batches.append(
            TrainBatch(
                version=WeightVersion(0, number),
                minibatches=tuple(parts),
                rl_denominators=tuple(float(sum(w != 0 for s in part for w in s.rl)) for part in parts),
                ce_denominators=tuple(float(sum(w != 0 for s in part for w in s.ce)) for part in parts),
                distill_denominators=tuple(float(sum(w != 0 for s in part for w in s.distill)) for part in parts),
            )
        )
    return batches


def _sample(rng: random.Random, name: str, taught: bool) -> TrainSample:
    prompt, length = rng.randint(1, 9), rng.randint(2, 15)
    index = int(name.rsplit("/", 1)[1])
    with_ce, with_rl = index % 4 == 3, index != 3
    rl = [float(rng.choice((0.5, 1.0, 1.0))) if with_rl and rng.random() > 0.2 else 0.0 for _ in range(length)]
    return TrainSample(
        sample_id=name,
        input_ids=tuple(rng.randrange(VOCABULARY) for _ in range(prompt + length)),
        prompt_length=prompt,
        rl=tuple(0.0 if taught and index == 2 else weight for weight in rl),
        distill=tuple(weight * random.Random(name).choice((0.5, 2.0)) if taught and index % 2 == 0 else 0.0 for weight in rl),
        ce=tuple(rng.choice((0.5, 1.0)) if with_ce else 0.0 for _ in range(length)),
        advantages=tuple([rng.gauss(0, 1)] * length if index % 2 else [rng.gauss(0, 1) for _ in range(length)]),
        behaviour_logprobs=tuple(rng.gauss(-4.0, 1.5) if weight else -1e9 for weight in rl),
        lag=tuple(random.Random(name).choices((0, 0, 1, 2), k=length)),
        steps=_steps(random.Random(f"{name} steps"), rl),
    )


def _steps(rng: random.Random, rl: list[float]) -> Steps:
    """A reward on every token that the policy wrote.  Half of the tokens without RL weight it did not write; the others are
    stale."""
    actions = tuple(bool(weight) or rng.random() < 0.5 for weight in rl)
    return Steps(rewards=tuple(rng.gauss(1, 1) if action else 0.0 for action in actions), actions=actions)


@dataclass
class Trace:
    """One batch: log-probs before it, the gradient before clipping and its norm per inner step, parameters after it."""

    logprobs: list[list[list[float]]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    parameters: dict[str, Tensor] = field(default_factory=dict)


class Adam:
    """AdamW by hand over a model's parameters, and its record: gradients and norms before clipping, by step."""

    def __init__(self, model: PreTrainedModel, prefix: str, rate: Callable[[int], float], max_norm: float) -> None:
        self.parameters = {prefix + name: p for name, p in model.named_parameters()}
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.rate, self.max_norm, self.steps = rate, max_norm, 0

    def step(self, trace: Trace) -> None:
        gradient = {name: p.grad.clone() for name, p in self.parameters.items()}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
        trace.gradients.append(gradient)
        trace.norms.append(norm)
        rate = self.rate(self.steps)
        self.steps += 1
        scale = min(1.0, self.max_norm / (norm + 1e-6))
        with torch.no_grad():
            for name, p in self.parameters.items():
                g = gradient[name] * scale
                self.first[name] = BETAS[0] * self.first[name] + (1 - BETAS[0]) * g
                self.second[name] = BETAS[1] * self.second[name] + (1 - BETAS[1]) * g * g
                m = self.first[name] / (1 - BETAS[0] ** self.steps)
                v = self.second[name] / (1 - BETAS[1] ** self.steps)
                if p.ndim > 1:
                    p -= rate * DECAY * p
                p -= rate * m / (v.sqrt() + EPS)


def plain_loop(folder: Path, rule: Rule, *, epochs: int, minibatches: int) -> Iterator[Trace]:
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    teacher = AutoModelForCausalLM.from_pretrained(teacher_of(folder), dtype=torch.float32).eval()
    critic = AutoModelForTokenClassification.from_pretrained(critic_of(folder), dtype=torch.float32).eval()
    inner = epochs * minibatches
    adam = Adam(policy, "", lambda step: lr(step, BATCHES * inner), MAX_NORM)
    critic_adam = Adam(critic, "critic.", lambda step: CRITIC_LR * (1 - 0.9 * step / (BATCHES * inner - 1)), CRITIC_MAX_NORM)
    for batch in recorded_batches(minibatches, taught=rule.taught):
        trace = Trace()
        trace.logprobs = [[token_logprobs(policy, s, TEMPERATURE).tolist() for s in part] for part in batch.minibatches]
        kept = [
            [keep(rule, sample, proximal, trace.events) for sample, proximal in zip(part, known, strict=True)]
            for part, known in zip(batch.minibatches, trace.logprobs, strict=True)
        ]
        parts = batch.minibatches
        if rule.critic:
            parts, lessons = appraise(critic, parts)
        for j in range(inner):
            index = j % minibatches
            if rule.critic:
                critic.zero_grad(set_to_none=True)
                for sample, lesson in zip(parts[index], lessons[index], strict=True):
                    teach_value(critic, sample, lesson, batch.rl_denominators[index], trace.events)
                critic_adam.step(trace)
            policy.zero_grad(set_to_none=True)
            rl_denominator = batch.rl_denominators[index]
            if rule.rejects:  # sequences with a kept token; a row's weights are shared anew in ``backward``
                rl_denominator = float(sum(any(mask) for mask in kept[index]))
            drift = []
            for sample, anchor, mask in zip(parts[index], trace.logprobs[index], kept[index], strict=True):
                place = Place(rl_denominator, batch.ce_denominators[index], j / inner)
                drift += backward(policy, reference, rule, sample, anchor, mask, place, trace.events)
                if any(sample.distill):
                    distill(policy, teacher, sample, anchor, batch.distill_denominators[index])
                    trace.events["taught"] += sum(weight != 0 for weight in sample.distill)
            adam.step(trace)
            if rule.max_inner_kl is not None and j + 1 < inner:
                stops = sum(math.exp(d) - 1 - d for d in drift) / len(drift) > rule.max_inner_kl
                trace.events["stopped early" if stops else "went on"] += 1
                if stops:
                    break
        trained = adam.parameters | (critic_adam.parameters if rule.critic else {})
        trace.parameters = {name: p.detach().clone() for name, p in trained.items()}
        yield trace


def keep(rule: Rule, sample: TrainSample, proximal: list[float], events: Counter[str]) -> list[bool]:
    """Which tokens of RL weight the rejections leave, [L]."""
    weighted = [t for t, weight in enumerate(sample.rl) if weight != 0]
    logs = {t: proximal[t] - sample.behaviour_logprobs[t] for t in weighted}
    if not rule.rejects or not weighted:
        return [weight != 0 for weight in sample.rl]
    mean = sum(logs.values()) / len(logs)
    kept = []
    for t in range(len(sample.rl)):
        keeps = t in logs
        if keeps and not ICEPOP[0] <= math.exp(logs[t]) <= ICEPOP[1]:
            keeps, events["icepop"] = False, events["icepop"] + 1
        if keeps and not GEOMETRIC[0] <= math.exp(mean) <= GEOMETRIC[1]:
            keeps, events["geometric"] = False, events["geometric"] + 1
        if keeps and sample.advantages[t] < 0 and -mean > OPSM_DELTA:
            keeps, events["opsm"] = False, events["opsm"] + 1
        kept.append(keeps)
    return kept


def lr(step: int, total: int) -> float:
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    angle = math.pi * (step - WARMUP) / (total - 1 - WARMUP)
    return LR * MIN_RATIO + LR * (1 - MIN_RATIO) * 0.5 * (1 + math.cos(angle))


def teacher_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-teacher")


def critic_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-critic")


def values_of(critic: PreTrainedModel, sample: TrainSample) -> Tensor:
    """[L], with the graph: the value of the state before each response token, from a forward pass over this sequence alone."""
    return critic(input_ids=torch.tensor([sample.input_ids])).logits[0, sample.prompt_length - 1 : -1, 0]


Lesson = tuple[list[float], list[float]]
"""Of a response: values at the start of the batch, and returns."""


def appraise(
    critic: PreTrainedModel, parts: Sequence[Sequence[TrainSample]]
) -> tuple[list[list[TrainSample]], list[list[Lesson]]]:
    """The samples with their advantages, Σ_k (γλ)^k δ_{t+k} over the tokens that the policy wrote, whitened over those of RL
    weight in the whole batch; and what the critic is to learn."""
    advantages, lessons = [], []
    for sample in (s for part in parts for s in part):
        assert sample.steps is not None
        with torch.no_grad():
            values = values_of(critic, sample).tolist()
        own = [t for t, action in enumerate(sample.steps.actions) if action]
        following = [values[t] for t in own[1:]] + [0.0]
        deltas = [sample.steps.rewards[t] + GAMMA * after - values[t] for t, after in zip(own, following, strict=True)]
        found = dict.fromkeys(range(len(values)), 0.0)
        for k, t in enumerate(own):
            found[t] = sum((GAMMA * LAM) ** (i - k) * deltas[i] for i in range(k, len(own)))
        advantages.append([found[t] for t in range(len(values))])
        lessons.append((values, [found[t] + v for t, v in enumerate(values)]))
    flat = [s for part in parts for s in part]
    trained = [a for s, row in zip(flat, advantages, strict=True) for a, weight in zip(row, s.rl, strict=True) if weight]
    mean = sum(trained) / len(trained)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in trained) / len(trained))
    scaled = [tuple((a - mean) / (deviation + 1e-6) for a in row) for row in advantages]
    white = iter([replace(sample, advantages=row) for sample, row in zip(flat, scaled, strict=True)])
    told = iter(lessons)
    return [[next(white) for _ in part] for part in parts], [[next(told) for _ in part] for part in parts]


def teach_value(critic: PreTrainedModel, sample: TrainSample, lesson: Lesson, denominator: float, events: Counter[str]) -> None:
    """Adds the gradient of Σ weight · max((V − R)², (clip(V) − R)²) / 2 / denominator, by hand in V: V − R, or 0 where
    the value has left the clip towards its return."""
    values = values_of(critic, sample)
    slopes = []
    for value, old, target, weight in zip(values.tolist(), *lesson, sample.rl, strict=True):
        near = max(min(value, old + VALUE_CLIP), old - VALUE_CLIP)
        stays = (near - target) ** 2 > (value - target) ** 2
        if weight:
            events["value: clipped" if stays else "value: moves"] += 1
        slopes.append(0.0 if stays else weight * (value - target) / denominator)
    (torch.tensor(slopes) * values).sum().backward()


def response_logprobs(model: PreTrainedModel, sample: TrainSample) -> Tensor:
    """[L, V], with the graph: log softmax(logits / T) where each response token was written."""
    logits = model(input_ids=torch.tensor([sample.input_ids])).logits[0, sample.prompt_length - 1 : -1]
    return torch.log_softmax(logits / TEMPERATURE, dim=-1)


def distill(
    policy: PreTrainedModel, teacher: PreTrainedModel, sample: TrainSample, proximal: list[float], denominator: float
) -> None:
    """Adds the gradient of Σ weight · KL(π ‖ π_T), by hand in log π: dKL / d log π(v) = π(v) (log π(v) − log π_T(v)), as
    Σ_v π(v) = 1 leaves the derivative of log π(v) itself without effect."""
    ours = response_logprobs(policy, sample)
    with torch.no_grad():
        gap = ours - response_logprobs(teacher, sample)
        shares = []
        for weight, known, behaviour in zip(sample.distill, proximal, sample.behaviour_logprobs, strict=True):
            ratio = min(math.exp(max(min(known - behaviour, 20.0), -20.0)), CAP) if weight else 0.0
            shares.append(DISTILL_COEFFICIENT * weight * ratio / denominator)
        slopes = torch.tensor(shares)[:, None] * ours.exp() * gap
    (slopes * ours).sum().backward()


def token_logprobs(model: PreTrainedModel, sample: TrainSample, temperature: float) -> Tensor:
    """[L], with the graph: log softmax(logits / T) of each response token, from a forward pass over this sequence alone."""
    ids = torch.tensor([sample.input_ids])
    logits = model(input_ids=ids).logits[0, sample.prompt_length - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)[torch.arange(len(sample.rl)), ids[0, sample.prompt_length :]]


@dataclass(frozen=True)
class Place:
    """Of an inner step: its global denominators, and how far the batch has come."""

    rl_denominator: float
    ce_denominator: float
    progress: float


def backward(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    rule: Rule,
    sample: TrainSample,
    proximal: list[float],
    kept: list[bool],
    place: Place,
    events: Counter[str],
) -> list[float]:
    """Adds the sample's gradient, d loss / d log π(token) by hand.  Counts which branch its tokens took.

    Returns log(π_θ / π_prox) of each kept token.
    """
    current = token_logprobs(policy, sample, TEMPERATURE)
    logprobs = current.tolist()
    with torch.no_grad():
        anchor = token_logprobs(reference, sample, TEMPERATURE).tolist()
    mine = [t for t, keeps in enumerate(kept) if keeps]
    events["stale"] += sum(weight == 0 for weight in sample.rl)
    if rule.loglinear:
        share = [lag / (lag + place.progress) if lag else 0.0 for lag in sample.lag]
        behaviour = sample.behaviour_logprobs
        proximal = [b + a * (x - b) for a, b, x in zip(share, behaviour, logprobs, strict=True)]
    drift = {t: logprobs[t] - proximal[t] for t in mine}
    logs = {t: proximal[t] - sample.behaviour_logprobs[t] for t in mine}
    reshared = sum(weight != 0 for weight in sample.rl) / len(mine) if rule.rejects and mine else 1.0
    slopes = [0.0] * len(sample.rl)
    for t in mine:
        level = {"token": logs[t], "sequence": sum(logs.values()), "geometric": sum(logs.values()) / len(logs)}[rule.level]
        weight = min(math.exp(max(min(level, 20.0), -20.0)), CAP)
        ratio = math.exp(sum(drift.values()) / len(drift) if rule.loss == "gspo" else drift[t])
        moved = math.exp(logprobs[t]) - math.exp(sample.behaviour_logprobs[t])
        branch = branch_of(rule, ratio, moved, sample.advantages[t])
        events.update([f"{rule.loss}: {branch}", "capped" if weight == CAP else "uncapped"])
        if rule.loss == "cispo":
            ratio, branch = max(min(ratio, 1 + rule.clip_high), 1 - rule.clip_low), "moves"
        share_of_loss = sample.rl[t] * reshared / place.rl_denominator
        surrogate = -weight * ratio * sample.advantages[t] * share_of_loss if branch == "moves" else 0.0
        for k in mine if rule.loss == "gspo" else [t]:  # the ratio of a sequence depends on all of its tokens alike
            slopes[k] += surrogate / (len(mine) if rule.loss == "gspo" else 1)
        # The gradient of KL(π ‖ reference), with which k3's value travels, weighed as a sample of the current policy.
        importance = min(math.exp(max(min(logprobs[t] - sample.behaviour_logprobs[t], 20.0), -20.0)), CAP)
        penalty = KL_COEFFICIENT * (logprobs[t] - anchor[t]) * importance
        slopes[t] += share_of_loss * penalty
    total = (torch.tensor(slopes) * current).sum()
    if any(sample.ce):
        total = total - (torch.tensor(sample.ce) * token_logprobs(policy, sample, 1.0)).sum() / place.ce_denominator
        events["cross-entropy"] += sum(weight != 0 for weight in sample.ce)
    total.backward()
    return list(drift.values())


def branch_of(rule: Rule, ratio: float, moved: float, advantage: float) -> str:
    if rule.loss == "dppo_tv":
        masked = moved > rule.clip_high if advantage > 0 else moved < -rule.clip_low
        return "masked" if masked else "moves"
    if rule.loss == "cispo":
        return "clipped high" if ratio > 1 + rule.clip_high else "clipped low" if ratio < 1 - rule.clip_low else "moves"
    if advantage >= 0:
        return "clipped high" if ratio > 1 + rule.clip_high else "moves"
    return "clipped low" if ratio < 1 - rule.clip_low else "dual clip" if ratio > DUAL_CLIP else "moves"
