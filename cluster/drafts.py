"""Drafts in a run: where a checkpoint has them, their averaging, and what the run says about them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from slipstream.cluster.fleet import Fleet
from slipstream.cluster.telemetry import Telemetry
from slipstream.core.metrics import Last, Mean, Metrics, Sum
from slipstream.core.speculation import Speculation
from slipstream.rollout.speculation.acceptance import Acceptance, DraftStats, Learning

FOLDER = "drafts"
"""Of a checkpoint."""


def saved_drafts(checkpoint: Path | None) -> list[Path]:
    """What the engines wrote down of drafts that learn, the first engine's first; none in a checkpoint without."""
    if checkpoint is None or not (checkpoint / FOLDER).is_dir():
        return []
    return sorted((checkpoint / FOLDER).iterdir(), key=lambda folder: int(folder.name.rpartition("-")[2]))


async def share_drafts(fleet: Fleet, every_s: float, telemetry: Telemetry) -> None:
    """Average the engines' drafts again and again, until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        await fleet.share_drafts()
        telemetry.event("drafts_shared", engines=len(fleet.members))


class DraftUsage:
    """Drafts between two steps, over all engines."""

    def __init__(self, speculation: Speculation) -> None:
        self._has_weights = speculation.draft is not None
        self._last: Acceptance | None = None
        self._learnt: list[Learning] = []

    def begin(self, engines: Sequence[DraftStats | None]) -> None:
        """From now on: what was drafted before, in evaluation, does not count."""
        self._last = _accepted(engines)
        self._learnt = _learning(engines)

    def step(self, engines: Sequence[DraftStats | None], batches: int) -> Metrics:
        """Figures since the last call.  ``batches`` committed so far is the age of a draft that never learns."""
        now, learning = _accepted(engines), _learning(engines)
        if now is None:
            return {}
        since = now.minus(self._last) if self._last is not None else now
        metrics = since.metrics()
        if learning:
            metrics |= _learnt_since(learning, self._learnt or [None] * len(learning))
        elif self._has_weights:
            metrics["draft/lag"] = Last(batches)
        self._last, self._learnt = now, learning
        return metrics


def _accepted(engines: Sequence[DraftStats | None]) -> Acceptance | None:
    known = [one.acceptance for one in engines if one is not None]
    return reduce(Acceptance.plus, known) if known else None


def _learning(engines: Sequence[DraftStats | None]) -> list[Learning]:
    return [one.learning for one in engines if one is not None and one.learning is not None]


def _learnt_since(now: Sequence[Learning], before: Sequence[Learning | None]) -> Metrics:
    """``draft/*`` of learning drafts, one per engine; ``draft/lag`` is of the one that has not learnt for longest."""

    def since(count: Callable[[Learning], float]) -> float:
        return sum(count(one) - (count(old) if old else 0) for one, old in zip(now, before, strict=True))

    busy = since(lambda one: one.busy_s)
    found: Metrics = {
        "draft/lag": Last(max(one.policy_batch - one.learned_batch for one in now)),
        "draft/updates": Sum(since(lambda one: one.updates)),
        "draft/kills": Sum(since(lambda one: one.kills)),
        "draft/postponed": Sum(since(lambda one: one.postponed)),
        "draft/lr": Last(min(one.lr for one in now)),
        "draft/cost_share": Mean(since(lambda one: one.update_s) / busy if busy else math.nan),
    }
    for name, known in {"loss": [one.loss for one in now], "baseline": [one.baseline for one in now]}.items():
        if not any(math.isnan(value) for value in known):
            found[f"draft/{name}"] = Mean(sum(known) / len(known))
    return found


def summarise_drafts(speculation: Speculation, telemetry: Telemetry) -> dict[str, Any]:
    """``"draft"`` of ``summary.json``: of the whole run, resumed attempts included."""
    rounds = telemetry.total("draft/rounds")
    return {
        "method": speculation.method if speculation.on else None,
        "lossy": speculation.lossy,
        "learns": speculation.learns,
        "acceptance_length": 1 + telemetry.total("draft/accepted") / rounds if rounds else None,
        "rounds": int(rounds),
        "updates": int(telemetry.total("draft/updates")),
        "kills": int(telemetry.total("draft/kills")),
        "lag": int(telemetry.latest["draft/lag"]) if "draft/lag" in telemetry.latest else None,
    }
