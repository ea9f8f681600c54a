"""The plain loop that the learner must equal: one process, one sequence at a time, every formula written out again.

Imports nothing of Slipstream but the records.  No autograd of losses either: the derivative of each token's loss with
respect to its log-probability is written by hand, and only the model is differentiated by torch.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from slipstream.core.records import TrainBatch, TrainSample, WeightVersion

VOCABULARY = 32
TEMPERATURE = 0.7
CLIP_LOW, CLIP_HIGH, DUAL_CLIP, CAP = 0.2, 0.3, 1.5, 2.0
KL_COEFFICIENT = 0.1
LR, BETAS, EPS, DECAY, MAX_NORM = 2e-3, (0.9, 0.95), 1e-4, 0.1, 0.5
WARMUP, MIN_RATIO = 2, 0.1
BATCHES = 5


def write_model(folder: Path, *, tied: bool) -> None:
    """A model of 15 thousand parameters, enough for every kind of layer."""
    torch.manual_seed(7)
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


def recorded_batches(minibatches: int) -> list[TrainBatch]:
    """Fixed trajectories: lengths 3 to 24, some tokens stale (weight 0, with absurd values that must not matter), some of the
    rest far off-policy (above the cap), one sample in four with cross-entropy, one of those with both streams."""
    rng = random.Random(11)
    batches = []
    for number in range(BATCHES):
        parts = [tuple(_sample(rng, f"{number}/{part}/{i}") for i in range(8)) for part in range(minibatches)]
        batches.append(
            TrainBatch(
                version=WeightVersion(0, number),
                minibatches=tuple(parts),
                rl_denominators=tuple(float(sum(w != 0 for s in part for w in s.rl)) for part in parts),
                ce_denominators=tuple(float(sum(w != 0 for s in part for w in s.ce)) for part in parts),
            )
        )
    return batches


def _sample(rng: random.Random, name: str) -> TrainSample:
    prompt, length = rng.randint(1, 9), rng.randint(2, 15)
    index = int(name.rsplit("/", 1)[1])
    with_ce, with_rl = index % 4 == 3, index != 3
    rl = [float(rng.choice((0.5, 1.0, 1.0))) if with_rl and rng.random() > 0.2 else 0.0 for _ in range(length)]
    return TrainSample(
        sample_id=name,
        input_ids=tuple(rng.randrange(VOCABULARY) for _ in range(prompt + length)),
        prompt_length=prompt,
        rl=tuple(rl),
        ce=tuple(rng.choice((0.5, 1.0)) if with_ce else 0.0 for _ in range(length)),
        advantages=tuple([rng.gauss(0, 1)] * length if index % 2 else [rng.gauss(0, 1) for _ in range(length)]),
        behaviour_logprobs=tuple(rng.gauss(-4.0, 1.5) if weight else -1e9 for weight in rl),
        lag=(0,) * length,
    )


@dataclass
class Trace:
    """One batch: log-probs before it, the gradient before clipping and its norm per inner step, parameters after it."""

    logprobs: list[list[list[float]]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def plain_loop(folder: Path, *, epochs: int, minibatches: int) -> Iterator[Trace]:
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = dict(policy.named_parameters())
    first = {name: torch.zeros_like(p) for name, p in parameters.items()}
    second = {name: torch.zeros_like(p) for name, p in parameters.items()}
    total, step = BATCHES * epochs * minibatches, 0
    for batch in recorded_batches(minibatches):
        trace = Trace()
        trace.logprobs = [[token_logprobs(policy, s, TEMPERATURE).tolist() for s in part] for part in batch.minibatches]
        proximal = trace.logprobs
        for _ in range(epochs):
            for index, part in enumerate(batch.minibatches):
                policy.zero_grad(set_to_none=True)
                for sample, anchor in zip(part, proximal[index], strict=True):
                    denominators = batch.rl_denominators[index], batch.ce_denominators[index]
                    trace.events += backward(policy, reference, sample, anchor, *denominators)
                gradient = {name: p.grad.clone() for name, p in parameters.items()}
                norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
                trace.gradients.append(gradient)
                trace.norms.append(norm)
                step += 1
                scale = min(1.0, MAX_NORM / (norm + 1e-6))
                with torch.no_grad():
                    for name, p in parameters.items():
                        g = gradient[name] * scale
                        first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * g
                        second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * g * g
                        m = first[name] / (1 - BETAS[0] ** step)
                        v = second[name] / (1 - BETAS[1] ** step)
                        rate = lr(step - 1, total)
                        if p.ndim > 1:
                            p -= rate * DECAY * p
                        p -= rate * m / (v.sqrt() + EPS)
        trace.parameters = {name: p.detach().clone() for name, p in parameters.items()}
        yield trace


def lr(step: int, total: int) -> float:
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    angle = math.pi * (step - WARMUP) / (total - 1 - WARMUP)
    return LR * MIN_RATIO + LR * (1 - MIN_RATIO) * 0.5 * (1 + math.cos(angle))


def token_logprobs(model: PreTrainedModel, sample: TrainSample, temperature: float) -> Tensor:
    """[L], with the graph: log softmax(logits / T) of each response token, from a forward pass over this sequence alone."""
    ids = torch.tensor([sample.input_ids])
    logits = model(input_ids=ids).logits[0, sample.prompt_length - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)[torch.arange(len(sample.rl)), ids[0, sample.prompt_length :]]


def backward(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    sample: TrainSample,
    proximal: list[float],
    rl_denominator: float,
    ce_denominator: float,
) -> Counter[str]:
    """Adds the sample's gradient, d loss / d log π(token) by hand.  Returns how many tokens took which branch."""
    events: Counter[str] = Counter()
    current = token_logprobs(policy, sample, TEMPERATURE)
    with torch.no_grad():
        anchor = token_logprobs(reference, sample, TEMPERATURE).tolist()
    slopes = []
    for t, logprob in enumerate(current.tolist()):
        if sample.rl[t] == 0:
            slopes.append(0.0)
            events["stale"] += 1
            continue
        ratio, advantage = math.exp(logprob - proximal[t]), sample.advantages[t]
        weight = min(math.exp(proximal[t] - sample.behaviour_logprobs[t]), CAP)
        capped = weight == CAP
        if advantage >= 0:
            branch = "clipped high" if ratio > 1 + CLIP_HIGH else "moves"
        else:
            branch = "clipped low" if ratio < 1 - CLIP_LOW else "dual clip" if ratio > DUAL_CLIP else "moves"
        events.update([branch, "capped" if capped else "uncapped"])
        surrogate = -weight * ratio * advantage if branch == "moves" else 0.0
        penalty = KL_COEFFICIENT * (logprob - anchor[t])  # the gradient of KL(π ‖ reference), with which k3's value travels
        slopes.append(sample.rl[t] * (surrogate + penalty) / rl_denominator)
    total = (torch.tensor(slopes) * current).sum()
    if any(sample.ce):
        total = total - (torch.tensor(sample.ce) * token_logprobs(policy, sample, 1.0)).sum() / ce_denominator
        events["cross-entropy"] += sum(weight != 0 for weight in sample.ce)
    total.backward()
    return events
