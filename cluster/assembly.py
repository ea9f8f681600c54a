"""From groups to a batch: advantages, the stale mask, the reduction, and what the batch says about itself.

The learner is blind to the algorithm; everything that distinguishes one from another is stamped on the tokens here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from slipstream.algos.advantages import batch_advantages
from slipstream.algos.reductions import token_weights
from slipstream.cluster.ledger import State
from slipstream.cluster.scoring import Penalty, bare_sample
from slipstream.cluster.staleness import decay, lags, loss_mask, outcome, staleness_metrics
from slipstream.core.algorithms import OF_BATCH, OF_GROUPS
from slipstream.core.metrics import Max, Mean, Metrics
from slipstream.core.records import Group, Steps, TrainBatch, TrainSample, Trajectory, WeightVersion, spans_of
from slipstream.core.schema import Recipe

SMALLEST = 1e-30
"""Weights below it are 0: in the learner's float32 they would become 0, and the denominator would not know."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """A batch for the learner, its line in ``metrics.jsonl``, and one record per sample for ``samples.jsonl``."""

    batch: TrainBatch
    metrics: Metrics
    records: list[dict[str, Any]]


def assemble(
    groups: Sequence[Group],
    version: WeightVersion,
    recipe: Recipe,
    context: int,
    penalty: Penalty | None = None,
    gap_of_sample: Mapping[str, Sequence[float]] | None = None,
) -> Assembled:
    """Stamp ``groups`` for the learner at ``version``; the lag of each token is fixed here.

    ``context`` is the most that prompt and response may have together, in tokens.
    ``penalty`` is the KL penalty where it belongs into the reward (``algo.kl.placement: reward``): the sum over a response, or,
    with ``advantage: gae``, that of each token at the token.
    ``gap_of_sample`` is log π_b − log π_T of each response token where it belongs into the advantages
    (``distill.form: policy_gradient``).
    """
    algo, max_tokens = recipe.algo, recipe.response_tokens(context)
    if (soft := algo.overlong.soft) is not None:
        groups = [_adjusted(group, "overlong", 1.0, lambda t: overlong_reward(t, max_tokens, soft)) for group in groups]
    steps = {t.sample_id: steps_of(t, penalty) for g in groups for t in g.trajectories} if algo.advantage == "gae" else {}
    if penalty is not None:
        groups = [_adjusted(group, "kl", -penalty.coefficient, lambda t: sum(penalty.gaps[t.sample_id])) for group in groups]
    advantages = batch_advantages([[t.reward for t in group.trajectories] for group in groups], algo.advantage)
    parts = _split(list(zip(groups, advantages, strict=True)), algo.minibatches)
    masks = {t.sample_id: loss_mask(t, version, recipe.schedule) for g in groups for t in g.trajectories}
    minibatches: list[tuple[TrainSample, ...]] = []
    denominators: list[float] = []
    rl_denominators: list[float] = []
    records: list[dict[str, Any]] = []
    for part in parts:
        pairs = [(g, t, a) for g, advantages_G in part for t, a in zip(g.trajectories, advantages_G, strict=True)]
        trajectories = [t for _, t, _ in pairs]
        ends = [outcome(t, masks[t.sample_id], filter_overlong=algo.overlong.filter) for t in trajectories]
        weights, denominator = _weights(trajectories, ends, masks, version, recipe, max_tokens)
        stamped = list(zip(pairs, weights, ends, strict=True))
        minibatches.append(
            tuple(
                _stamped_sample(t, w, _token_advantages(t, a, recipe, gap_of_sample), version, recipe, steps.get(t.sample_id))
                for (_, t, a), w, end in stamped
                if end == "trained"
            )
        )
        denominators.append(denominator)
        rl_denominators.append(denominator if recipe.trains_rl and _moves(minibatches[-1], recipe) else 0.0)
        records += [sample_record(g, t, None if steps else a, w, version, end) for (g, t, a), w, end in stamped]
    zeros = (0.0,) * len(minibatches)
    batch = TrainBatch(
        version=version,
        minibatches=tuple(minibatches),
        rl_denominators=tuple(rl_denominators),
        ce_denominators=zeros,
        distill_denominators=tuple(denominators) if recipe.teaches == "full" else zeros,
    )
    metrics = {**reward_metrics(groups), **staleness_metrics(groups, masks, version, recipe.schedule)}
    if gap_of_sample is not None:
        metrics["distill/kl"] = _mean_gap(batch, gap_of_sample)
    return Assembled(batch, metrics, records)


def assemble_demonstrations(
    demonstrations: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]], version: WeightVersion, minibatches: int = 1
) -> TrainBatch:
    """A batch of pure cross-entropy from (id, prompt ids, completion ids); the mean is over completion tokens."""
    parts = _split(list(demonstrations), minibatches)
    return TrainBatch(
        version=version,
        minibatches=tuple(tuple(_ce_sample(*demonstration) for demonstration in part) for part in parts),
        rl_denominators=(0.0,) * len(parts),
        ce_denominators=tuple(float(sum(len(completion) for _, _, completion in part)) for part in parts),
        distill_denominators=(0.0,) * len(parts),
    )


def overlong_reward(trajectory: Trajectory, max_tokens: int, soft: float) -> float:
    """0 up to (1 − ``soft``) · ``max_tokens`` written tokens, then falling in a line to −1 at ``max_tokens``.

    Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13, with L_cache = ``soft`` · L_max.
    """
    room = soft * max_tokens
    return -min(max((sum(trajectory.loss_mask) - (max_tokens - room)) / room, 0.0), 1.0)


def steps_of(trajectory: Trajectory, penalty: Penalty | None) -> Steps:
    """What a critic learns from: the score on the last token that the policy wrote, less the penalty of each token."""
    mine = trajectory.loss_mask
    rewards = [0.0] * len(mine)
    if penalty is not None:
        rewards = [-penalty.coefficient * gap for gap in penalty.gaps[trajectory.sample_id]]
    if any(mine):
        rewards[max(t for t, written in enumerate(mine) if written)] += trajectory.reward
    return Steps(rewards=tuple(rewards), actions=mine)


def _weights(
    trajectories: Sequence[Trajectory],
    outcomes: Sequence[State],
    masks: Mapping[str, Sequence[bool]],
    version: WeightVersion,
    recipe: Recipe,
    max_tokens: int,
) -> tuple[list[list[float]], float]:
    """Weights of the responses of one mini-batch, in whatever streams train on them, and their denominator, which does not
    depend on the decay by lag."""
    schedule = recipe.schedule
    kept = [
        masks[t.sample_id] if end == "trained" else [False] * len(t.token_ids)
        for t, end in zip(trajectories, outcomes, strict=True)
    ]
    shares, denominator = token_weights(recipe.algo.reduction, kept, max_tokens=max_tokens)
    if schedule.lag_decay == schedule.kv_lag_decay == 1.0:
        return shares, denominator
    decays = [decay(t, version, schedule) for t in trajectories]
    return [[_no_smaller(w * d) for w, d in zip(*pair, strict=True)] for pair in zip(shares, decays, strict=True)], denominator


def _no_smaller(weight: float) -> float:
    return weight if weight >= SMALLEST else 0.0


def _moves(samples: Sequence[TrainSample], recipe: Recipe) -> bool:
    """Whether the RL stream of a mini-batch has a gradient.  Equal rewards give none, and then there must be no step either:
    Adam's momentum would move the weights without one."""
    algo = recipe.algo
    if not any(map(any, (sample.rl for sample in samples))):
        return False
    if algo.advantage not in (*OF_GROUPS, *OF_BATCH) or (algo.kl.coefficient and algo.kl.placement == "loss"):
        return True
    return any(a and w for sample in samples for a, w in zip(sample.advantages, sample.rl, strict=True))


def _split(items: list[Any], parts: int) -> list[list[Any]]:
    """Contiguous parts whose sizes differ by one at most; never an empty one."""
    parts = min(parts, len(items))
    bounds = [round(i * len(items) / parts) for i in range(parts + 1)]
    return [items[a:b] for a, b in pairwise(bounds)]


def _adjusted(group: Group, name: str, coefficient: float, part: Callable[[Trajectory], float]) -> Group:
    """The group with one more part in its rewards."""
    trajectories = tuple(
        replace(t, reward=t.reward + coefficient * part(t), rewards={**t.rewards, name: part(t)}) for t in group.trajectories
    )
    return replace(group, trajectories=trajectories)


def _token_advantages(
    trajectory: Trajectory, advantage: float, recipe: Recipe, gap_of_sample: Mapping[str, Sequence[float]] | None
) -> tuple[float, ...]:
    """The response's advantage on each token, less ``distill.coefficient`` · (log π_b − log π_T) of the token: no discount
    carries a token's gap to the tokens before it (Lu & Thinking Machines Lab 2025, "On-Policy Distillation")."""
    if gap_of_sample is None:
        return (advantage,) * len(trajectory.token_ids)
    return tuple(advantage - recipe.distill.coefficient * gap for gap in gap_of_sample[trajectory.sample_id])


def _mean_gap(batch: TrainBatch, gap_of_sample: Mapping[str, Sequence[float]]) -> Mean:
    """Over the tokens that the batch trains on."""
    samples = [sample for part in batch.minibatches for sample in part]
    pairs = [pair for s in samples for pair in zip(gap_of_sample[s.sample_id], s.rl, strict=True)]
    return _mean([gap for gap, weight in pairs if weight])


def _stamped_sample(
    trajectory: Trajectory,
    weights: Sequence[float],
    advantages: tuple[float, ...],
    version: WeightVersion,
    recipe: Recipe,
    steps: Steps | None,
) -> TrainSample:
    """A response with its weights in the streams that the recipe trains on rollouts."""
    bare, given = bare_sample(trajectory), tuple(weights)
    return replace(
        bare,
        rl=given if recipe.trains_rl else bare.rl,
        distill=given if recipe.teaches == "full" else bare.distill,
        advantages=advantages,
        lag=lags(trajectory.policy_versions, version),
        steps=steps,
    )


def _ce_sample(sample_id: str, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> TrainSample:
    zeros = (0.0,) * len(completion_ids)
    return TrainSample(
        sample_id=sample_id,
        input_ids=prompt_ids + completion_ids,
        prompt_length=len(prompt_ids),
        rl=zeros,
        ce=(1.0,) * len(completion_ids),
        distill=zeros,
        advantages=zeros,
        behaviour_logprobs=zeros,
        lag=(0,) * len(completion_ids),
    )


def sample_record(
    group: Group,
    trajectory: Trajectory,
    advantage: float | None,
    weights: Sequence[float],
    version: WeightVersion,
    outcome: State,
) -> dict[str, Any]:
    """One line of ``samples.jsonl``; per-token values that repeat are run-length spans [value, start, end].  ``advantage`` is
    None where a critic makes those of the tokens, in the learner."""
    prompt = group.task.prompt
    return {
        "batch": version.batch + 1,
        "assembled_at": str(version),
        "sample_id": trajectory.sample_id,
        "group_id": group.task.id,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "prompt_ids": list(trajectory.prompt_ids),
        "token_ids": list(trajectory.token_ids),
        "text": trajectory.text,
        "loss_mask": _runs(trajectory.loss_mask, int),
        "versions": [[str(v), a, b] for v, a, b in spans_of(trajectory.policy_versions)],
        "kv_versions": [[str(v), a, b] for v, a, b in spans_of(trajectory.kv_versions)],
        "weights": _runs(weights, float),
        "behaviour_logprobs": [round(x, 7) for x in trajectory.behaviour_logprobs],
        "reward": trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "advantage": advantage,
        "status": trajectory.status,
        "draft": trajectory.draft._asdict(),
        "outcome": outcome,
    }


def _runs(values: Sequence[Any], cast: Callable[[Any], Any]) -> list[list[Any]]:
    runs, start = [], 0
    for value, run in groupby(values):
        end = start + sum(1 for _ in run)
        runs.append([cast(value), start, end])
        start = end
    return runs


def reward_metrics(groups: Sequence[Group]) -> Metrics:
    """``reward/*`` and ``response/*`` of the groups of one batch."""
    trajectories = [t for group in groups for t in group.trajectories]
    n = len(trajectories)
    parts = sorted({name for t in trajectories for name in t.rewards})
    spread = [max(r) - min(r) for r in ([t.reward for t in g.trajectories] for g in groups)]
    return {
        "reward/mean": _mean([t.reward for t in trajectories]),
        "reward/group_spread": _mean(spread),
        **{f"reward/{name}": _mean([t.rewards[name] for t in trajectories if name in t.rewards]) for name in parts},
        "response/length_mean": _mean([len(t.token_ids) for t in trajectories]),
        "response/length_max": Max(max((len(t.token_ids) for t in trajectories), default=0)),
        "response/truncated_frac": Mean(sum(t.status == "length" for t in trajectories) / n, n),
        "response/eos_frac": Mean(sum(t.status == "eos" for t in trajectories) / n, n),
    }


def _mean(numbers: Sequence[float]) -> Mean:
    return Mean(sum(numbers) / len(numbers), len(numbers)) if numbers else Mean(0.0, 0.0)
