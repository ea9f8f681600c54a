"""The live display of a run, and the table at its end."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from slipstream.core.schema import Recipe

LINE_EVERY_S = 10.0
"""Without a terminal, one plain line is printed so often."""
_BEFORE = "starting Ray and the controller"
_AWAITED = {"starting": "starting the engines and the learner (mostly vLLM loading itself)"}


class Display:
    """A progress bar with the numbers that matter; plain lines where the output is no terminal."""

    def __init__(self, recipe: Recipe, *, quiet: bool = False, console: Console | None = None) -> None:
        self._recipe = recipe
        self._quiet = quiet
        self._console = console or Console()
        self._live: Live | None = None
        self._printed = 0.0
        self._said: str | None = None
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._warm = (
            self._progress.add_task("warm start", total=recipe.warm_start.steps, visible=False) if recipe.warm_start else None
        )
        self._steps = self._progress.add_task(recipe.name, total=recipe.schedule.steps, start=False, visible=False)
        self._clock = Waiting(self._console, quiet=quiet or not self._console.is_terminal)
        self._clock.say(_BEFORE)

    def __enter__(self) -> Display:
        if not self._quiet and self._console.is_terminal:
            self._live = Live(Group(self._progress, self._clock.progress), console=self._console, refresh_per_second=4)
            self._live.__enter__()
        self.update(None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def update(self, snapshot: dict[str, Any] | None) -> None:
        """Show a snapshot of the controller; None while it is coming up."""
        if self._quiet:
            return
        if self._live is None:
            self._print(snapshot)
            return
        if snapshot is None:
            return
        self._clock.say(awaited(snapshot["stage"]))
        if self._warm is not None:
            visible = snapshot["stage"] == "warm start"
            self._progress.update(self._warm, completed=snapshot["warm_step"], visible=visible)
        if snapshot["stage"] == "training":
            self._progress.start_task(self._steps)
        started = self._progress.tasks[self._steps].started
        self._progress.update(self._steps, completed=snapshot["step"], visible=started)
        shown = [numbers(snapshot, self._recipe.schedule.max_staleness)] if started else []
        self._live.update(Group(self._progress, self._clock.progress, *shown))

    def _print(self, snapshot: dict[str, Any] | None) -> None:
        now = time.monotonic()
        text = line(snapshot, self._recipe) if snapshot else f"{_BEFORE} ..."
        stage = snapshot["stage"] if snapshot else ""
        if now - self._printed >= LINE_EVERY_S or stage != self._said:
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)
            self._printed, self._said = now, stage


def line(snapshot: dict[str, Any], recipe: Recipe) -> str:
    """One plain line, such as ``training 40/100 · reward 0.71 · lag 1.2 (max 2) · …``."""
    if snapshot["stage"] == "warm start":
        total = recipe.warm_start.steps if recipe.warm_start else 0
        return f"warm start {snapshot['warm_step']}/{total}"
    if (waiting := awaited(snapshot["stage"])) is not None and not snapshot["step"]:
        return f"{waiting} ..."
    metrics = snapshot["metrics"]
    parts = [f"{snapshot['stage']} {snapshot['step']}/{recipe.schedule.steps}"]
    shown = {
        "reward": "reward/mean",
        "loss": "loss/ce",
        "teacher kl": "distill/kl",
        "lag": "staleness/token_mean",
        "tok/s": "throughput/rollout_tokens_per_s",
    }
    parts += [f"{name} {_figure(metrics[key])}" for name, key in shown.items() if key in metrics]
    if snapshot["evaluations"]:
        last = snapshot["evaluations"][-1]
        parts.append(f"held-out {last['metric']} {last['score']:.3f} (step {last['step']})")
    return " · ".join(parts)


def _figure(value: float) -> str:
    """Three digits, and never an exponent for what is large: ``0.0123``, ``2260``."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def awaited(stage: str) -> str | None:
    """What is waited for in a stage that has no steps to count; None where there are some."""
    return None if stage in ("warm start", "training") else _AWAITED.get(stage, stage)


def numbers(snapshot: dict[str, Any], bound: int) -> Table:
    """The small table under the bar."""
    metrics, ledger = snapshot["metrics"], snapshot["ledger"]

    def shown(name: str, form: str = "{:.3g}") -> str:
        return form.format(metrics[name]) if isinstance(metrics.get(name), (int, float)) else "–"

    evaluations = " → ".join(f"{e['score']:.3f}" for e in snapshot["evaluations"][-4:]) or "–"
    table = Table.grid(padding=(0, 3))
    table.add_row(
        f"reward {shown('reward/mean', '{:.3f}')}",
        f"held-out {evaluations}",
        f"length {shown('response/length_mean')}",
        f"entropy {shown('loss/entropy')}",
    )
    table.add_row(
        f"lag {shown('staleness/token_mean')} (max {shown('staleness/token_max')}, bound {bound})",
        f"masked {shown('staleness/masked_frac', '{:.1%}')}",
        f"version {snapshot['version']} (engines {snapshot['confirmed']})",
        f"pause {shown('weights/pause_s', '{:.3f}')} s",
    )
    table.add_row(
        f"{shown('throughput/rollout_tokens_per_s', '{:.0f}')} tok/s sampled",
        f"{shown('throughput/trained_tokens_per_s', '{:.0f}')} tok/s trained",
        f"idle learner {shown('idle/learner', '{:.0%}')}, rollout {shown('idle/rollout', '{:.0%}')}",
        " · ".join(f"{state.replace('_', ' ')} {ledger[state]}" for state in ("in_flight", "trained", "stale", "filtered")),
    )
    return table


def final_table(summary: dict[str, Any]) -> Table:
    """What came out, in a few rows."""
    table = Table(title=f"run {summary['status']}", show_header=False, title_justify="left")
    evaluation, staleness, ledger = summary["eval"], summary["staleness"], summary["ledger"]
    if evaluation["before"] is not None:
        after = "–" if evaluation["after"] is None else f"{evaluation['after']:.3f}"
        table.add_row(f"held-out {evaluation['metric']}", f"{evaluation['before']:.3f} → {after}  (n = {evaluation['n']})")
    start = "" if summary["start_s"] is None else f" (start {summary['start_s']:.0f} s)"
    table.add_row("steps", f"{summary['version']} of {summary['steps']} in {summary['wall_s']:.0f} s{start}")
    versions = staleness["versions_per_sample_max"]
    table.add_row(
        "token lag",
        f"mean {staleness['token_mean']:.2f}, trained max {staleness['trained_token_max']} (bound {staleness['bound']}), "
        f"masked {staleness['masked_frac']:.2%}, up to {versions} version{'' if versions == 1 else 's'} in one response",
    )
    table.add_row("samples", " · ".join(f"{name} {n}" for name, n in ledger.items() if n))
    throughput, idle, weights = summary["throughput"], summary["idle"], summary["weights"]
    table.add_row(
        "tokens/s",
        f"sampled {throughput['rollout_tokens_per_s']:.0f}, "
        f"trained {throughput['trained_tokens_per_s']:.0f} (with prompts and every epoch)",
    )
    table.add_row("idle", f"learner {idle['learner']:.0%}, rollout {idle['rollout']:.0%}")
    table.add_row(
        "weight updates", f"{weights['publishes']}, generation paused {1000 * weights['pause_s_p50']:.0f} ms each (median)"
    )
    return table


class Waiting:
    """What a command waits for, with a running clock; without a terminal, a plain line for each thing awaited.

    As a context it shows itself; a display of its own shows ``progress``.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self._console = console or Console()
        self.progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=self._console, transient=True
        )
        self._task = self.progress.add_task("", total=None, visible=False)
        self._said: str | None = None
        self._quiet = quiet

    def __enter__(self) -> Waiting:
        if self._console.is_terminal:
            self.progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._console.is_terminal:
            self.progress.__exit__(kind, error, trace)

    def say(self, what: str | None) -> None:
        """From now on ``what`` is waited for, or nothing; the clock starts again where that is something else."""
        if what == self._said:
            return
        self._said = what
        self.progress.reset(self._task, description=what or "", visible=what is not None)
        if what and not self._quiet and not self._console.is_terminal:
            self._console.print(f"{what} ...", soft_wrap=True, highlight=False)


class Stages:
    """A progress bar per stage of a command that is no run."""

    def __init__(self, *, quiet: bool = False) -> None:
        columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[loss]}"), disable=quiet)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Stages:
        self._progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.__exit__(kind, error, trace)

    def update(self, stage: str, done: int, total: int, loss: float | None) -> None:
        shown = "" if loss is None else f"loss {loss:.3f}"
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total, loss=shown)
        self._progress.update(self._tasks[stage], completed=done, loss=shown)
