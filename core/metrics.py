"""Typed metrics: each knows how two of its kind become one, so a mean over ranks is never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with the number of things it is over.  ``Mean(1.0, 1)`` and ``Mean(4.0, 2)`` merge to ``Mean(3.0, 3)``."""

    mean: float
    count: float = 1.0

    def merge(self, other: Mean) -> Mean:
        count = self.count + other.count
        if count == 0:
            return Mean(0.0, 0.0)
        return Mean((self.mean * self.count + other.mean * other.count) / count, count)

    def value(self) -> float:
        """The mean, or NaN over nothing."""
        return self.mean if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Sum:
    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    top: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.top, other.top))

    def value(self) -> float:
        return self.top


@dataclass(frozen=True, slots=True)
class Last:
    """A state rather than a sample (learning rate, version): the later one stands."""

    state: float

    def merge(self, other: Last) -> Last:
        return other

    def value(self) -> float:
        return self.state


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by integer value, such as tokens by lag: ``Histogram({0: 310, 1: 42})``."""

    counts: Mapping[int, int]

    def merge(self, other: Histogram) -> Histogram:
        return Histogram({k: self.counts.get(k, 0) + other.counts.get(k, 0) for k in sorted({*self.counts, *other.counts})})

    def value(self) -> dict[str, int]:
        return {str(k): n for k, n in sorted(self.counts.items())}


Metric = Mean | Sum | Max | Last | Histogram
Metrics = dict[str, Metric]


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """One set of metrics from many.  Raises TypeError if two parts use one name for two kinds."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            known = merged.get(name)
            if known is None:
                merged[name] = metric
            elif type(known) is not type(metric):
                raise TypeError(f"metric {name!r}: got {type(metric).__name__}, but it is a {type(known).__name__} elsewhere")
            else:
                merged[name] = known.merge(metric)  # type: ignore[arg-type]
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float | dict[str, int]]:
    """Plain numbers for JSON, sorted by name; NaN means (over nothing) are left out."""
    plain = {name: metrics[name].value() for name in sorted(metrics)}
    return {name: value for name, value in plain.items() if not (isinstance(value, float) and math.isnan(value))}
