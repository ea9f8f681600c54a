"""``slipstream report RUN``: one HTML file about a run that anyone can open, mail or keep.

Pictures are inside, there is no script, and nothing is loaded from anywhere; a content security policy says so to the browser.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.cluster.report_charts import History, draw_lags, draw_learning, draw_ledger, draw_panel
from slipstream.cluster.report_page import clock, duration, page, percent, safe, section, show
from slipstream.cluster.report_panels import Panel, panels
from slipstream.cluster.report_samples import Decode, choose, read_latest, render
from slipstream.core.rundir import RunDirectory, write_atomically

_LAGS = (
    "Lag of each token: the learner's version when its batch was assembled minus the version that sampled the token. "
    "Darker: a larger share of the batch. Red: beyond the bound, so without loss weight."
)
_MOST_EVENTS = 100
_FREQUENT = 20  # kinds of events beyond it are counted, not listed


def build_report(run_dir: Path, decode: Decode | None = None) -> Path:
    """Write ``report.html`` of a run, finished or not, and return its path.

    What was not logged is left out.  ``decode`` gives the text of a token id for the samples; without it, tokens of models
    that write a character at a time show their character, others their id.  Raises UserError if ``run_dir`` is no run.
    """
    run = RunDirectory.open(run_dir)
    metrics, events = run.read("metrics"), run.read("events")
    summary = _summary(run.summary_file)
    history = History(metrics.records)
    bound = (summary.get("staleness") or {}).get("bound")
    if bound is None:
        bound = _bound_of(run)
    torn = [name for name, lines in (("metrics.jsonl", metrics), ("events.jsonl", events)) if lines.torn]
    body = [
        _header(run_dir.name, summary, history, torn),
        _cards(summary, history),
        section("Learning", _figure(draw_learning(history, _evaluations(events.records)), "Reward and held-out score")),
        section(
            "Staleness",
            _figure(draw_lags(history, bound), _LAGS),
        ),
        section("Over the steps", _grid([*_reward_parts(history), *panels(bound)], history)),
        section("Ledger", _ledger(summary)),
        section("Summary", _summary_tables(summary)),
        section("Samples", "".join(render(why, one, decode) for why, one in choose(read_latest(run.stream_file("samples"))))),
        section("Events", _events(events.records)),
        section(
            "Recipe", f"<details open><summary>recipe.yaml</summary><pre>{safe(run.recipe_file.read_text())}</pre></details>"
        ),
    ]
    write_atomically(run.report_file, page(run_dir.name, body).encode("utf-8", "replace"))
    return run.report_file


def _summary(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _bound_of(run: RunDirectory) -> int | None:
    """``max_staleness`` of a run that has no summary yet."""
    try:
        return run.recipe().schedule.max_staleness
    except ValueError:  # its secrets are redacted; the report needs none of them
        return None


def _evaluations(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event.get("kind") == "eval"]


def _header(name: str, summary: Mapping[str, Any], history: History, torn: Sequence[str]) -> str:
    status = str(summary.get("status", "unfinished"))
    times = [record["time"] for record in history.records if isinstance(record.get("time"), int | float)]
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(times[-1])) if times else "no step yet"
    done, planned = summary.get("version", len(history.records)), summary.get("steps")
    facts = [f"{done} steps" if planned is None else f"{done} of {planned} steps", f"last step {when}"]
    if wall := summary.get("wall_s"):
        facts.insert(1, duration(wall))
    error = f'<p class="error"><b>error</b> {safe(summary["error"])}</p>' if summary.get("error") else ""
    cut = f'<p class="error">The last line of {safe(", ".join(torn))} was cut off by a crash.</p>' if torn else ""
    return (
        f'<header><p class="brand">slipstream</p>'
        f'<h1>{safe(name)} <span class="status {safe(status)}">{safe(status)}</span></h1>'
        f"<p>{safe(' · '.join(facts))}</p>{error}{cut}</header>"
    )


def _cards(summary: Mapping[str, Any], history: History) -> str:
    """The handful of numbers that one looks for first."""

    def of(section: str, key: str) -> Any:
        return (summary.get(section) or {}).get(key)

    cards: list[tuple[str, str, str]] = []
    before, after = of("eval", "before"), of("eval", "after")
    if before is not None or after is not None:
        value = " → ".join(f"{score:.3f}" for score in (before, after) if score is not None)
        cards.append((f"held-out {of('eval', 'metric') or 'score'}", value, f"n = {show(of('eval', 'n'))}"))
    elif len(rewards := history.series("reward/mean")[1]):
        cards.append(("reward", f"{rewards[0]:.3f} → {rewards[-1]:.3f}", "first and last batch"))
    if (oldest := of("staleness", "token_max")) is not None:
        trained = of("staleness", "trained_token_max")
        shown = oldest if trained is None else trained
        note = f"bound {show(of('staleness', 'bound'))}, mean {show(of('staleness', 'token_mean'))}"
        cards.append(("largest lag trained on" if trained is not None else "largest token lag", show(shown), note))
        cards.append(("tokens held out as stale", percent(of("staleness", "masked_frac")), "no loss weight"))
    if (ess := of("offpolicy", "ess_mean")) is not None:
        cards.append(("effective sample size", percent(ess), f"largest ratio {show(of('offpolicy', 'ratio_max'))}"))
    if (idle := of("idle", "learner")) is not None:
        cards.append(
            ("idle: learner / rollout", f"{percent(idle, 0)} / {percent(of('idle', 'rollout'), 0)}", "share of the run")
        )
    if (speed := of("throughput", "rollout_tokens_per_s")) is not None:
        cards.append(
            (
                "rollout",
                f"{speed:,.0f}",
                f"tokens/s, trained {show(of('throughput', 'trained_tokens_per_s'))} (with prompts and every epoch)",
            )
        )
    if (pause := of("weights", "pause_s_p50")) is not None:
        cards.append(("pause for new weights", f"{pause * 1000:.0f} ms", f"median of {show(of('weights', 'publishes'))}"))
    boxes = (f"<div><h4>{safe(n)}</h4><p>{safe(v)}</p><small>{safe(note)}</small></div>" for n, v, note in cards)
    return f'<section class="cards">{"".join(boxes)}</section>' if cards else ""


def _grid(wanted: Sequence[Panel], history: History) -> str:
    figures = [(panel, draw_panel(panel, history)) for panel in wanted]
    grid = "".join(
        f'<figure class="panel"><h3>{safe(p.title)}</h3><img alt="{safe(p.title)}" src="{picture}">'
        f"<figcaption>{safe(p.caption)}</figcaption></figure>"
        for p, picture in figures
        if picture
    )
    return f'<div class="grid">{grid}</div>' if grid else ""


def _reward_parts(history: History) -> list[Panel]:
    """A panel for the reward functions where there are several."""
    names = [name for name in history.names("reward/") if name not in ("reward/mean", "reward/group_spread")]
    series = tuple((name, name.removeprefix("reward/")) for name in names)
    caption = "Each function's score, before its weight."
    return [Panel("Reward functions", caption, series, from_zero=False)] if len(names) > 1 else []


def _figure(picture: str | None, caption: str) -> str:
    if picture is None:
        return ""
    return f'<figure class="wide"><img alt="{safe(caption)}" src="{picture}"><figcaption>{safe(caption)}</figcaption></figure>'


def _ledger(summary: Mapping[str, Any]) -> str:
    ledger = summary.get("ledger") or {}
    caption = f"Every dispatched sample is in exactly one place: {show(ledger.get('dispatched'))} in all"
    return _figure(draw_ledger(ledger), caption)


def _summary_tables(summary: Mapping[str, Any]) -> str:
    tables = []
    for name, part in summary.items():
        if isinstance(part, Mapping):
            rows = "".join(f"<tr><th>{safe(key)}</th><td>{safe(show(value))}</td></tr>" for key, value in part.items())
            tables.append(f'<table class="small"><caption>{safe(name)}</caption>{rows}</table>')
    return f'<div class="tables">{"".join(tables)}</div>' if tables else ""


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    """How often each kind happened, and the rare ones (starts, faults, restarts, evaluations) one by one."""
    if not events:
        return ""
    counts = Counter((str(event.get("kind")), str(event.get("reason") or "")) for event in events)
    kinds = Counter(str(event.get("kind")) for event in events)
    rows = "".join(
        f"<tr><th>{safe(kind)}</th><td>{safe(reason)}</td><td>{n}</td></tr>" for (kind, reason), n in counts.most_common()
    )
    rare = [event for event in events if kinds[str(event.get("kind"))] <= _FREQUENT]
    shown = rare if len(rare) <= _MOST_EVENTS else [*rare[: _MOST_EVENTS // 2], *rare[-_MOST_EVENTS // 2 :]]
    lines = "".join(
        f"<tr><td>{clock(event.get('time'))}</td><th>{safe(event.get('kind'))}</th><td>{safe(_details(event))}</td></tr>"
        for event in shown
    )
    left = f"<p>{len(rare) - len(shown)} more in events.jsonl</p>" if len(rare) > len(shown) else ""
    counted = f'<table class="small"><caption>counts</caption>{rows}</table>'
    return f'{counted}<table class="log"><caption>log</caption>{lines}</table>{left}'


def _details(event: Mapping[str, Any]) -> str:
    fields = {key: round(value, 4) if isinstance(value, float) else value for key, value in event.items()}
    text = ", ".join(
        f"{key} {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items() if key not in ("time", "kind")
    )
    return text if len(text) <= 400 else f"{text[:399]}…"
