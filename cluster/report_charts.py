"""The report's pictures: SVG with everything in it, from the lines of ``metrics.jsonl``."""

from __future__ import annotations

import base64
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from slipstream.cluster.report_panels import Panel

INK, MUTED, GRID, LIMIT = "#1f2933", "#64748b", "#e2e8f0", "#dc2626"
COLOURS = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#0891b2", "#b45309")
_MOST_POINTS = 400
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": "#cbd5e1",
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.hashsalt": "slipstream",
}


@dataclass(frozen=True, slots=True)
class History:
    """The metric lines of a run, in order."""

    records: Sequence[Mapping[str, Any]]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a number; empty if it was never logged."""
        points = [(r["step"], r[name]) for r in self.records if isinstance(r.get(name), int | float)]
        return np.array([x for x, _ in points], dtype=float), np.array([y for _, y in points], dtype=float)

    def histograms(self, name: str) -> dict[int, dict[int, float]]:
        """Counts by bucket of each step."""
        found: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for record in self.records:
            if isinstance(record.get(name), Mapping):
                for bucket, count in record[name].items():
                    found[record["step"]][int(bucket)] += count
        return found

    def names(self, prefix: str) -> list[str]:
        return sorted({name for record in self.records for name in record if name.startswith(prefix)})


def draw_panel(panel: Panel, history: History) -> str | None:
    """The panel as an ``img`` source, or None where nothing of it was logged."""
    present = [(metric, label, *history.series(metric)) for metric, label in panel.series]
    present = [line for line in present if len(line[2])]
    if not present:
        return None
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 2.5), layout="constrained")
        axes = figure.subplots()
        for colour, (metric, label, x, y) in zip(COLOURS, present, strict=False):
            _line(axes, x, y, colour, label, smooth=not metric.endswith("_max"))
        if panel.limit is not None:
            _limit_line(axes, panel.limit)
        _frame(axes, panel.unit)
        if panel.share:
            axes.set_ylim(-0.02, 1.02)
        elif panel.from_zero and min(y.min() for *_, y in present) >= 0:
            highest = max(y.max() for *_, y in present)
            axes.set_ylim(0, None if highest else 1)
        if len(present) > 1 or panel.limit is not None:
            _legend(axes)
        return _image(figure)


def draw_learning(history: History, evaluations: Sequence[Mapping[str, Any]]) -> str | None:
    """Reward of the training batches, and held-out accuracy."""
    x, y = history.series("reward/mean")
    points = [(e["step"], e["score"]) for e in evaluations if isinstance(e.get("score"), int | float)]
    if not len(x) and not points:
        return None
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11.4, 3.3), layout="constrained")
        axes = figure.subplots()
        if len(x):
            _line(axes, x, y, COLOURS[0], "reward of training batches")
        if points:
            steps, scores = zip(*points, strict=True)
            metric = str(evaluations[-1].get("metric") or "score")
            style = {"color": COLOURS[1], "marker": "o", "markersize": 6, "linewidth": 1.2, "linestyle": (0, (4, 3))}
            axes.plot(steps, scores, label=f"held-out {metric}", zorder=5, **style)
            for (step, score), side in ((points[0], "left"), (points[-1], "right"))[: len(points)]:
                place = {"xytext": (0, 9), "textcoords": "offset points", "ha": side, "fontsize": 9, "fontweight": "bold"}
                axes.annotate(f"{score:.3f}", (step, score), color=COLOURS[1], zorder=6, **place)
        _frame(axes, "")
        axes.margins(y=0.12)
        _legend(axes)
        return _image(figure)


def draw_lags(history: History, bound: int | None, name: str = "staleness/token_hist") -> str | None:
    """Which lags the tokens of each batch had, as a heat map over steps, with the totals beside it and the bound drawn.

    Lags beyond the bound are red.  The darkness grows with the root of the share, so that rare lags are seen.
    """
    histograms = history.histograms(name)
    if not histograms:
        return None
    steps = sorted(histograms)
    top = max([lag for counts in histograms.values() for lag in counts] + [bound or 0])
    columns = np.array_split(np.array(steps), min(len(steps), 160))
    tokens = np.zeros((top + 1, len(columns)))
    for place, column in enumerate(columns):
        for step in column:
            for lag, count in histograms[int(step)].items():
                tokens[lag, place] += count
    limit = top if bound is None else bound
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11.4, 1.0 + 0.42 * min(top + 1.6, 9)), layout="constrained")
        over_time, overall = figure.subplots(1, 2, width_ratios=(5, 1), sharey=True)
        _heat_map(over_time, tokens, limit, (steps[0] - 0.5, steps[-1] + 0.5, -0.5, top + 0.5))
        _totals(overall, tokens.sum(1), limit)
        if bound is not None:
            for axes in (over_time, overall):
                axes.axhline(bound + 0.5, color=LIMIT, linewidth=1.4, linestyle=(0, (4, 2)))
            label = {
                "color": LIMIT,
                "ha": "right",
                "va": "bottom",
                "fontsize": 8.5,
                "transform": over_time.get_yaxis_transform(),
            }
            over_time.text(0.995, bound + 0.54, f"bound: max_staleness = {bound}", **label)
        over_time.set_ylim(-0.5, top + 1.1)
        return _image(figure)


def _heat_map(axes: Axes, tokens: np.ndarray, limit: int, extent: tuple[float, float, float, float]) -> None:
    shares = tokens / np.maximum(tokens.sum(0), 1)
    rows = np.arange(len(shares))[:, None]
    for visible, end in ((rows <= limit, "#1d4ed8"), (rows > limit, "#b91c1c")):
        shown = np.ma.masked_where(~(visible & (shares > 0)), np.sqrt(shares))
        colours = mpl.colors.LinearSegmentedColormap.from_list("lag", ["#ffffff", end])
        axes.imshow(shown, origin="lower", aspect="auto", interpolation="nearest", extent=extent, cmap=colours, vmin=0, vmax=1)
    axes.grid(False)
    axes.set_xlabel("step")
    axes.set_ylabel("lag of a token, in batches")
    axes.set_yticks(range(0, len(shares), 1 if len(shares) <= 12 else 2))


def _totals(axes: Axes, tokens: np.ndarray, limit: int) -> None:
    shares = tokens / max(tokens.sum(), 1)
    colours = [LIMIT if lag > limit else COLOURS[0] for lag in range(len(shares))]
    axes.barh(range(len(shares)), shares, height=0.72, color=colours)
    for lag, value in enumerate(shares):
        if value:
            axes.text(value + 0.03, lag, f"{value:.1%}" if value >= 0.001 else "<0.1%", va="center", fontsize=8.5)
    axes.set_xlim(0, 1.4)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.grid(False)
    axes.set_title("all tokens", fontsize=9, color=MUTED)


def draw_ledger(ledger: Mapping[str, Any]) -> str | None:
    """Where every dispatched sample went, as one bar."""
    colours = {"trained": COLOURS[2], "training": "#6ee7b7", "ready": COLOURS[0], "in_flight": "#93c5fd",
               "stale": COLOURS[1], "filtered": "#94a3b8", "failed": LIMIT}  # fmt: skip
    counts = {name: int(ledger.get(name) or 0) for name in colours}
    total = sum(counts.values())
    if not total:
        return None
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11.4, 1.05), layout="constrained")
        axes = figure.subplots()
        left = 0
        for name, count in counts.items():
            if count:
                axes.barh(0, count, left=left, color=colours[name], height=0.8, label=f"{name} {count} ({count / total:.1%})")
                left += count
        axes.set_xlim(0, total)
        axes.set_axis_off()
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=7, handlelength=1, handleheight=1)
        return _image(figure)


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str, label: str, smooth: bool = True) -> None:
    """The values, faint under a running mean where there are many; a maximum is never averaged."""
    if len(x) < 30 or not smooth:
        axes.plot(*_thin(x, y, smooth), color=colour, linewidth=1.4, marker="o" if len(x) == 1 else None, label=label)
        return
    axes.plot(*_thin(x, y), color=colour, linewidth=0.8, alpha=0.28)
    width = max(len(y) // 25, 3)
    sums = np.cumsum(np.insert(y, 0, 0.0))
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(ends - width, 0)
    axes.plot(*_thin(x, (sums[ends] - sums[starts]) / (ends - starts)), color=colour, linewidth=1.8, label=label)


def _thin(x: np.ndarray, y: np.ndarray, mean: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """At most 400 points, each the mean (or the maximum) of its neighbours, so that a long run's report stays small."""
    if len(x) <= _MOST_POINTS:
        return x, y
    parts = list(zip(np.array_split(x, _MOST_POINTS), np.array_split(y, _MOST_POINTS), strict=True))
    return np.array([part.mean() for part, _ in parts]), np.array([part.mean() if mean else part.max() for _, part in parts])


def _frame(axes: Axes, unit: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(axis="x", visible=False)
    axes.margins(x=0.01)


def _limit_line(axes: Axes, limit: float) -> None:
    axes.axhline(limit, color=LIMIT, linewidth=1.2, linestyle=(0, (4, 2)), label="bound")


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.1, handlelength=1.4, columnspacing=1.2)


def _image(figure: Figure) -> str:
    """The figure as ``data:image/svg+xml`` for an ``img``, where nothing in it can act on the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
