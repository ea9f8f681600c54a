"""What a run says about itself: metric lines to every sink, events, samples, and the summary at the end."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from slipstream.cluster.evaluation import EvalResult
from slipstream.core.metrics import Histogram, Max, Mean, Metrics, Sum, merge, values
from slipstream.core.rundir import RunDirectory

log = logging.getLogger("slipstream")


class MetricSink(Protocol):
    """Where a step's metrics go.  A sink that fails is reported and counted; it never stops the training."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """``metrics.jsonl``: one object per step."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.append("metrics", {"step": step, "time": time.time(), **metrics})

    def close(self) -> None:
        pass


class RaySink:
    """Ray's metrics, for Prometheus and Grafana: the same names with ``_`` for ``/``; no tag but the run's name."""

    def __init__(self, run_name: str) -> None:
        self._tags = {"run": run_name}
        self._gauges: dict[str, Any] = {}

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        from ray.util.metrics import Gauge

        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                gauge = self._gauges.get(name)
                if gauge is None:
                    gauge = self._gauges[name] = Gauge(re.sub(r"\W", "_", f"slipstream_{name}"), tag_keys=("run",))
                gauge.set(float(value), tags=self._tags)

    def close(self) -> None:
        self._gauges.clear()


def open_sinks(names: Sequence[str], run: RunDirectory, run_name: str) -> list[MetricSink]:
    makers: dict[str, Callable[[], MetricSink]] = {"jsonl": lambda: JsonlSink(run), "ray": lambda: RaySink(run_name)}
    return [makers[name]() for name in names]


class Telemetry:
    """Writes a run's records, and keeps the totals that ``summary.json`` needs.

    ``history`` restores the totals of the steps before a resume from ``metrics.jsonl``; ``evaluations`` are those before it.
    """

    def __init__(
        self,
        run: RunDirectory,
        run_name: str,
        sinks: Sequence[str],
        history: Sequence[Mapping[str, Any]] = (),
        evaluations: Sequence[EvalResult] = (),
    ) -> None:
        self._run = run
        self._sinks = open_sinks(["jsonl", *sinks], run, run_name)
        self._totals: Metrics = {}
        self.sink_failures = 0
        self.evaluations = list(evaluations)
        self.latest: dict[str, Any] = {}
        self.started = time.time()
        for line in history:
            self._remember(line)

    def event(self, kind: str, **fields: Any) -> None:
        self._run.append("events", {"time": time.time(), "kind": kind, **fields})

    def samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            self._run.append("samples", record)

    def step(self, step: int, metrics: Metrics) -> None:
        """Send one step's metrics to every sink."""
        plain = values(metrics)
        self.latest |= plain
        self._remember(plain)
        for sink in self._sinks:
            try:
                sink.write(step, plain)
            except Exception:  # a metric sink is one of the two seams where a fault is contained
                self.sink_failures += 1
                log.exception("metric sink %s failed at step %d", type(sink).__name__, step)

    def evaluated(self, result: EvalResult) -> None:
        self.evaluations.append(result)
        self.event("eval", **result.as_dict())

    def _remember(self, plain: Mapping[str, Any]) -> None:
        kinds: dict[str, type[Mean] | type[Max] | type[Sum]] = {
            "staleness/token_max": Max,
            "staleness/trained_token_max": Max,
            "staleness/sample_oldest_max": Max,
            "staleness/versions_per_sample_max": Max,
            "offpolicy/ratio_max": Max,
            "offpolicy/ess": Mean,
            "offpolicy/sampler_kl": Mean,
            "draft/rounds": Sum,
            "draft/accepted": Sum,
            "draft/updates": Sum,
            "draft/kills": Sum,
        }
        found: Metrics = {name: kind(float(plain[name])) for name, kind in kinds.items() if name in plain}
        if "staleness/token_hist" in plain:
            by_lag = Histogram({int(k): n for k, n in plain["staleness/token_hist"].items()})
            found["staleness/token_hist"], tokens = by_lag, sum(by_lag.counts.values())
            means = ("staleness/kv_mean", "staleness/masked_frac")
            found |= {name: Mean(float(plain[name]), tokens) for name in means if name in plain}
        for name in ("weights/pause_s", "weights/publish_s"):
            if name in plain:
                found[name] = Histogram({round(float(plain[name]) * 1e6): 1})
        self._totals = merge([self._totals, found])

    def total(self, name: str) -> float:
        """A total of the run so far; 0.0 where nothing was measured."""
        metric = self._totals.get(name)
        assert not isinstance(metric, Histogram)
        return float(metric.value()) if metric is not None else 0.0

    def histogram(self, name: str) -> Mapping[int, int]:
        metric = self._totals.get(name)
        return metric.counts if isinstance(metric, Histogram) else {}

    def median_s(self, name: str) -> float:
        """Median of a duration that was remembered in microseconds."""
        spread = sorted(k for k, n in self.histogram(name).items() for _ in range(n))
        return spread[len(spread) // 2] / 1e6 if spread else 0.0

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def summarise(
    telemetry: Telemetry,
    *,
    status: str,
    error: str | None,
    steps: int,
    version: int,
    bound: int,
    ledger: Mapping[str, int],
    idle: Mapping[str, float],
    throughput: Mapping[str, float],
    start_s: float | None,
    publishes: int,
    resumes: int,
    draft: Mapping[str, Any],
) -> dict[str, Any]:
    """``summary.json`` (section 4 of the design).  Times, and failures of sinks, are of this process's attempt; counts are of
    the whole run, attempts before it included.  ``start_s`` of ``wall_s`` passed before the first rollout for training.
    No engine is restarted yet: a dead one ends the run."""
    wall = time.time() - telemetry.started
    lags = telemetry.histogram("staleness/token_hist")
    tokens = sum(lags.values())
    evaluations = telemetry.evaluations
    return {
        "status": status,
        "error": error,
        "steps": steps,
        "version": version,
        "wall_s": round(wall, 3),
        "start_s": None if start_s is None else round(start_s, 3),
        "eval": {
            "before": evaluations[0].score if evaluations else None,
            "after": evaluations[-1].score if len(evaluations) > 1 else None,
            "n": evaluations[-1].n if evaluations else 0,
            "metric": evaluations[-1].metric if evaluations else None,
        },
        "staleness": {
            "bound": bound,
            "token_mean": sum(lag * n for lag, n in lags.items()) / tokens if tokens else 0.0,
            "token_max": int(telemetry.total("staleness/token_max")),
            "trained_token_max": int(telemetry.total("staleness/trained_token_max")),
            "sample_oldest_max": int(telemetry.total("staleness/sample_oldest_max")),
            "masked_frac": telemetry.total("staleness/masked_frac"),
            "kv_mean": telemetry.total("staleness/kv_mean"),
            "versions_per_sample_max": int(telemetry.total("staleness/versions_per_sample_max")),
        },
        "ledger": {**ledger, "duplicates": 0},  # by construction: Flow.finish ends the run over a group that comes twice
        "offpolicy": {
            "ratio_max": _finite(telemetry.total("offpolicy/ratio_max")),
            "ess_mean": _finite(telemetry.total("offpolicy/ess")),
            "sampler_kl_mean": _finite(telemetry.total("offpolicy/sampler_kl")),
        },
        "draft": dict(draft),
        "throughput": dict(throughput),
        "idle": dict(idle),
        "weights": {
            "publishes": publishes,
            "pause_s_p50": telemetry.median_s("weights/pause_s"),
            "publish_s_p50": telemetry.median_s("weights/publish_s"),
        },
        "faults": {"engine_restarts": 0, "learner_restarts": resumes, "sink_failures": telemetry.sink_failures},
    }


def _finite(number: float) -> float | None:
    """None for what has no JSON: a run that diverged still gets its summary."""
    return number if math.isfinite(number) else None
