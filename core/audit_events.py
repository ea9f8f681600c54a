"""The event log of a run, replayed: which groups hold a slot, what was committed, which version every engine holds.

``events.jsonl`` holds one object per line, ``{"time": …, "kind": …}`` and these fields (others, and other kinds, are skipped):

================================  =====================================================================================
kind                              fields
================================  =====================================================================================
``start``                         ``attempt``, ``bound``, ``groups_per_step``, ``kv_bound`` (null or left out: none); with
                                  ``resumed_from`` also a ``resume``
``dispatch``                      ``group_id``, ``version`` (newest that every engine has confirmed), ``samples``; again
                                  only after ``failed``, ``stale`` or a resume
``ready``                         ``group_id``
``filtered, failed, stale``       ``group_id``, ``samples``: the group left without being committed
``commit``                        ``batch`` (the first is 1), ``version``, ``groups``
``confirmed``                     ``version``, ``engine`` (left out where one event speaks for all of them)
``checkpoint``                    ``batch``: what a resume of that batch goes back to; without it, the batch's commit is
``resume``                        ``attempt``, ``batch``: everything after that batch's checkpoint is forgotten
``end``                           ``status``
================================  =====================================================================================
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.records import WeightVersion

SHOWN = 3
"""How many offenders of a check are named; the others are counted."""


class Findings:
    """What the checks found, by check, and the files whose last line was torn off by a crash."""

    def __init__(self) -> None:
        self._first: dict[str, list[str]] = {}
        self._count: Counter[str] = Counter()
        self.torn: list[str] = []

    def add(self, check: str, offender: str) -> None:
        self._count[check] += 1
        first = self._first.setdefault(check, [])
        if len(first) < SHOWN:
            first.append(offender)

    def problems(self) -> list[str]:
        """One line per failed check: ``"slots: 2 found: A; B"``."""
        lines = []
        for check, first in self._first.items():
            more = self._count[check] - len(first)
            lines.append(f"{check}: {self._count[check]} found: {'; '.join(first)}" + (f"; and {more} more" if more else ""))
        return lines


def read_lines(path: Path, findings: Findings) -> Iterator[tuple[str, dict[str, Any]]]:
    """``("events.jsonl:12", record)`` of every line; a torn last line is noted, any other bad line is a finding."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path.name}:{number}"
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield where, record
            elif not line.endswith(b"\n"):
                findings.torn.append(path.name)
            else:
                findings.add("format", f"{where} is not a JSON object")


def a_version(value: Any) -> WeightVersion:
    return WeightVersion.parse(a_text(value))


def a_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"got {value!r}, expected text")
    return value


def a_count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"got {value!r}, expected a whole number")
    return value


def a_bound(value: Any) -> int | None:
    return None if value is None else a_count(value)


def a_number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"got {value!r}, expected a number")
    return value


def a_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"got {value!r}, expected a list")
    return value


def names(value: Any) -> tuple[str, ...]:
    return tuple(a_text(item) for item in a_list(value))


def parse(record: Mapping[str, Any], fields: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """The named fields, converted.  Raises ValueError that names the first one that is missing or unfit."""
    values = {}
    for name, convert in fields.items():
        if name not in record:
            raise ValueError(f"{name!r} is missing")
        try:
            values[name] = convert(record[name])
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
    return values


ENDINGS = ("filtered", "failed", "stale")

FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "start": {"attempt": a_count, "bound": a_count, "groups_per_step": a_count, "kv_bound": a_bound},
    "dispatch": {"group_id": a_text, "version": a_version, "samples": a_count},
    "ready": {"group_id": a_text},
    **{kind: {"group_id": a_text, "samples": a_count} for kind in ENDINGS},
    "commit": {"batch": a_count, "version": a_version, "groups": names},
    "confirmed": {"version": a_version},
    "checkpoint": {"batch": a_count},
    "resume": {"attempt": a_count, "batch": a_count},
    "end": {},
}


@dataclass(frozen=True, slots=True)
class Event:
    where: str
    kind: str
    fields: Mapping[str, Any]
    engine: Any = None


def parse_events(lines: Iterable[tuple[str, dict[str, Any]]], findings: Findings) -> list[Event]:
    """The events that the audit knows.  One that lacks a field is a finding, and left out."""
    events = []
    for where, record in lines:
        kind = record.get("kind")
        kinds = [kind] if kind in FIELDS else []
        if kind == "start":
            record = {"kv_bound": None, **record}
        if kind == "start" and record.get("resumed_from") is not None:
            record, kinds = {**record, "batch": record["resumed_from"]}, ["start", "resume"]
        try:
            events += [Event(where, name, parse(record, FIELDS[name]), record.get("engine")) for name in kinds]
        except ValueError as error:
            findings.add("format", f"{where} {kind}: {error}")
    return events


@dataclass(slots=True)
class Flight:
    """A group between dispatch and commit.  ``restored``: a resume brought it back; it may be dispatched once more."""

    samples: int
    ready: bool = False
    restored: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    version: WeightVersion
    groups: tuple[str, ...]


class Replay:
    """The state of the run after ``events``; whatever breaks a rule on the way goes to ``findings``."""

    def __init__(self, events: Iterable[Event], findings: Findings, engines: Mapping[int, set[Any]] | None = None) -> None:
        events = list(events)
        self._findings = findings
        self._engines = engines if engines is not None else _engines_by_attempt(events)
        self.rollouts = any(event.kind == "dispatch" for event in events)  # else every batch is of demonstrations
        self.bound = self.groups_per_step = 0
        self.kv_bound: int | None = None
        self.live: dict[str, Flight] = {}
        self.committed: dict[str, int] = {}  # samples of every committed group
        self.commits: dict[int, Commit] = {}
        self.resumes: list[WeightVersion] = []
        self.totals: Counter[str] = Counter()  # samples dispatched, filtered, failed, and stale before assembly
        self.held_max = 0
        self.started = self.ended = False
        self._filtered: set[str] = set()
        self._base = self._learner = WeightVersion(0, 0)
        self._confirmed_by: dict[Any, WeightVersion] = {}
        self._unconfirmed: list[Commit] = []
        self._short: str | None = None
        self._history: list[Event] = []
        handlers: dict[str, Callable[..., None]] = {
            "start": self._start,
            "dispatch": self._dispatch,
            "ready": self._ready,
            **dict.fromkeys(ENDINGS, self._leave),
            "commit": self._commit,
            "confirmed": self._confirm,
            "checkpoint": lambda event, batch: None,
            "resume": self._resume,
            "end": self._end,
        }
        for event in events:
            handlers[event.kind](event, **event.fields)
            self._history.append(event)

    @property
    def slots(self) -> int:
        return (self.bound + 1) * self.groups_per_step

    @property
    def held(self) -> int:
        """Groups with a slot: live (once a resumed run has dispatched them again) or committed and not yet confirmed."""
        live = sum(flight.ready or not flight.restored for flight in self.live.values())
        return live + sum(len(commit.groups) for commit in self._unconfirmed)

    @property
    def confirmed(self) -> WeightVersion:
        """The newest version that every engine holds."""
        engines = self._engines.get(self._base.attempt, set())
        return min((self._confirmed_by.get(engine, self._base) for engine in engines), default=self._base)

    def _start(self, event: Event, attempt: int, bound: int, groups_per_step: int, kv_bound: int | None) -> None:
        self.bound, self.groups_per_step, self.kv_bound = bound, groups_per_step, kv_bound
        if not self.started:
            self._base = self._learner = WeightVersion(attempt, 0)
        self.started = True

    def _dispatch(self, event: Event, group_id: str, version: WeightVersion, samples: int) -> None:
        if version > self.confirmed:
            self._findings.add(
                "versions", f"{event.where} dispatches {group_id} at {version}, but every engine holds only {self.confirmed}"
            )
        flight = self.live.get(group_id)
        if flight is None or not flight.restored:
            if flight or group_id in self.committed or group_id in self._filtered:
                self._findings.add("once", f"{event.where} dispatches {group_id} again")
            self.totals["dispatched"] += samples
        self.live[group_id] = Flight(samples)
        self.held_max = max(self.held_max, self.held)
        if self.held > self.slots:
            self._findings.add("slots", f"{event.where} dispatches {group_id} as number {self.held} of {self.slots}")

    def _ready(self, event: Event, group_id: str) -> None:
        if group_id in self.live:
            self.live[group_id].ready = True
        else:
            self._findings.add("ledger", f"{event.where}: {group_id} is ready, but not in flight")

    def _leave(self, event: Event, group_id: str, samples: int) -> None:
        flight = self.live.pop(group_id, None)
        if flight is None or flight.samples != samples:
            state = f"{flight.samples} samples were dispatched" if flight else "it is not live"
            self._findings.add("ledger", f"{event.where}: {samples} samples of {group_id} are {event.kind}, but {state}")
        if event.kind == "filtered":
            self._filtered.add(group_id)
        self.totals[event.kind] += samples

    def _commit(self, event: Event, batch: int, version: WeightVersion, groups: tuple[str, ...]) -> None:
        if version != self._learner.next() or batch != version.batch:
            expected = f"batch {self._learner.batch + 1} as {self._learner.next()}"
            self._findings.add("batches", f"{event.where} commits batch {batch} as {version}, expected {expected}")
        if self._short:
            self._findings.add("batches", self._short)
        size = self.groups_per_step if self.rollouts else 0
        wrong = f"{event.where}: batch {batch} has {len(groups)} groups, expected {size}"
        self._short = wrong if 0 < len(groups) < size else None
        if len(groups) > size or (size and not groups):
            self._findings.add("batches", wrong)
        for group_id in groups:
            flight = self.live.pop(group_id, None)
            if group_id in self.committed:
                self._findings.add("once", f"{event.where}: {group_id} is committed again")
            elif flight is None or not flight.ready:
                self._findings.add("ledger", f"{event.where}: {group_id} is committed, but was not ready")
            self.committed.setdefault(group_id, flight.samples if flight else 0)
        self._learner = version
        self.commits[batch] = Commit(version, groups)
        self._unconfirmed.append(self.commits[batch])

    def _confirm(self, event: Event, version: WeightVersion) -> None:
        held = self._confirmed_by.get(event.engine, self._base)
        if self.rollouts and not held <= version <= self._learner:
            self._findings.add(
                "versions", f"{event.where} confirms {version}, expected one between the engine's {held} and {self._learner}"
            )
        self._confirmed_by[event.engine] = version
        self._unconfirmed = [commit for commit in self._unconfirmed if commit.version > self.confirmed]

    def _resume(self, event: Event, attempt: int, batch: int) -> None:
        """Go back to the checkpoint: the groups that were live then are so again, the engines start anew."""
        marks = [i for i, e in enumerate(self._history, 1) if e.kind in ("commit", "checkpoint") and e.fields["batch"] == batch]
        if not marks and batch:
            self._findings.add("batches", f"{event.where} resumes from batch {batch}, which was not committed")
            return
        self._history = self._history[: marks[-1] if marks else 1]
        past = Replay(self._history, Findings(), self._engines)
        self.live, self.committed, self.commits, self.totals = past.live, past.committed, past.commits, past.totals
        self._filtered = past._filtered
        for flight in self.live.values():
            flight.restored = True
        self._base = self._learner = WeightVersion(attempt, batch)
        self.resumes.append(self._base)
        self._confirmed_by, self._unconfirmed, self._short, self.ended = {}, [], None, False

    def _end(self, event: Event) -> None:
        self.ended = True


def _engines_by_attempt(events: Iterable[Event]) -> dict[int, set[Any]]:
    """Every engine that ever confirms a version of an attempt: a slot waits for all of them, from the first version on."""
    engines: dict[int, set[Any]] = {}
    for event in events:
        if event.kind == "confirmed":
            engines.setdefault(event.fields["version"].attempt, set()).add(event.engine)
    return engines
