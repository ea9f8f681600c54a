"""How old each token is when its batch is assembled, which tokens may be trained, and what becomes of their sample.

A token has two lags, in committed batches: that of the policy that sampled it, and that of the oldest KV entry it attended to,
which is never smaller.  Attempts do not enter: a resume goes on from the batch that it was saved at, and refuses what was
sampled after that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from slipstream.cluster.ledger import State
from slipstream.core.metrics import Histogram, Max, Mean, Metrics
from slipstream.core.records import Group, Trajectory, WeightVersion, spans_of
from slipstream.core.schema import Schedule

QUARTERS = 4
"""Parts of a response in which masked tokens are counted apart: masking favours late tokens."""


def lags(versions: Sequence[WeightVersion], learner: WeightVersion) -> tuple[int, ...]:
    """Lag of each token's version (of its policy, or of its oldest KV entry) [L], for the learner at ``learner``."""
    return tuple(learner.batch - version.batch for version in versions)


def loss_mask(trajectory: Trajectory, learner: WeightVersion, schedule: Schedule) -> list[bool]:
    """Action and not stale, per response token [L]: invariant 1 of the design, and ``max_kv_lag`` besides."""
    return list(fresh(trajectory, learner, schedule))


def outcome(trajectory: Trajectory, mask: Iterable[bool], *, filter_overlong: bool) -> State:
    """What becomes of a sample in a batch, given its ``loss_mask`` (or ``fresh``, of which no more is read than needed).

    ``stale`` without one token that may be trained (an empty response has none), ``filtered`` where it was cut off and such
    ones are left out, else ``trained``.
    """
    if not any(mask):
        return "stale"
    return "filtered" if filter_overlong and trajectory.status == "length" else "trained"


def fully_stale(trajectory: Trajectory, learner: WeightVersion, schedule: Schedule) -> bool:
    return not any(fresh(trajectory, learner, schedule))


def decay(trajectory: Trajectory, learner: WeightVersion, schedule: Schedule) -> list[float]:
    """``lag_decay`` to the power of the lag times ``kv_lag_decay`` to the power of the KV lag, per response token [L]."""
    pairs = zip(lags(trajectory.policy_versions, learner), lags(trajectory.kv_versions, learner), strict=True)
    return [schedule.lag_decay**lag * schedule.kv_lag_decay**kv_lag for lag, kv_lag in pairs]


def fresh(trajectory: Trajectory, learner: WeightVersion, schedule: Schedule) -> Iterator[bool]:
    """``loss_mask``, token by token."""
    oldest = learner.batch - schedule.max_staleness
    oldest_kv = oldest if schedule.max_kv_lag is None else learner.batch - schedule.max_kv_lag
    tokens = zip(trajectory.loss_mask, trajectory.policy_versions, trajectory.kv_versions, strict=True)
    for mine, version, kv_version in tokens:
        yield mine and version.batch >= oldest and (schedule.max_kv_lag is None or kv_version.batch >= oldest_kv)


def staleness_metrics(
    groups: Sequence[Group], masks: Mapping[str, Sequence[bool]], learner: WeightVersion, schedule: Schedule
) -> Metrics:
    """``staleness/*``: lags in committed batches, over the tokens that the policy wrote; ``masks`` by sample id."""
    by_lag: Counter[int] = Counter()
    kv_lag_sum = kv_lag_max = masked_by_policy = trained_max = 0
    written, masked = [0] * QUARTERS, [0] * QUARTERS
    for trajectory in (t for group in groups for t in group.trajectories):
        mine, length = trajectory.loss_mask, len(trajectory.token_ids)
        mask = masks[trajectory.sample_id]
        for sampled, start, end in spans_of(trajectory.policy_versions):
            if count := sum(mine[start:end]):
                lag = learner.batch - sampled.batch
                by_lag[lag] += count
                masked_by_policy += count * (lag > schedule.max_staleness)
                trained_max = max(trained_max, lag * any(mask[start:end]))
        for oldest, start, end in spans_of(trajectory.kv_versions):
            if count := sum(mine[start:end]):
                kv_lag_sum += (learner.batch - oldest.batch) * count
                kv_lag_max = max(kv_lag_max, learner.batch - oldest.batch)
        for quarter in range(QUARTERS):
            part = slice(quarter * length // QUARTERS, (quarter + 1) * length // QUARTERS)
            written[quarter] += sum(mine[part])
            masked[quarter] += sum(mine[part]) - sum(mask[part])
    tokens = sum(by_lag.values())
    versions = [t.policy_versions for group in groups for t in group.trajectories if t.policy_versions]
    counts = [len(set(of_sample)) for of_sample in versions]
    return {
        "staleness/token_mean": Mean(sum(lag * n for lag, n in by_lag.items()) / max(tokens, 1), tokens),
        "staleness/token_max": Max(max(by_lag, default=0)),
        "staleness/trained_token_max": Max(trained_max),
        "staleness/token_hist": Histogram(dict(sorted(by_lag.items()))),
        "staleness/sample_oldest_max": Max(max((learner.batch - min(of_sample).batch for of_sample in versions), default=0)),
        "staleness/kv_mean": Mean(kv_lag_sum / max(tokens, 1), tokens),
        "staleness/kv_max": Max(kv_lag_max),
        "staleness/versions_per_sample": Mean(sum(counts) / max(len(counts), 1), len(counts)),
        "staleness/versions_per_sample_max": Max(max(counts, default=0)),
        "staleness/masked_frac": Mean(sum(masked) / max(tokens, 1), tokens),
        "staleness/kv_masked_frac": Mean((sum(masked) - masked_by_policy) / max(tokens, 1), tokens),
        **{f"staleness/masked_frac_q{q + 1}": Mean(masked[q] / max(written[q], 1), written[q]) for q in range(QUARTERS)},
    }
