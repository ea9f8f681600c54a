"""``slipstream audit RUN``: the staleness bound and the ledger, recomputed from the run's own records.

Nothing of the code that ran is used, only ``events.jsonl`` (see ``core.audit_events``), ``samples.jsonl`` and, where there is
one, ``summary.json``.  A line of ``samples.jsonl`` is one sample of an assembled batch; of it the audit reads

    {"batch": 7, "assembled_at": "0.6", "sample_id": "train/0/17#3", "group_id": "train/0/17", "outcome": "trained",
     "token_ids": […], "behaviour_logprobs": […], "loss_mask": [[1, 0, 9]], "weights": [[0.0, 0, 4], [1.0, 4, 9]],
     "versions": [["0.3", 0, 4], ["0.6", 4, 9]], "kv_versions": [["0.3", 0, 9]]}

where ``[value, start, end]`` is a run of equal values over response tokens.  Standard library only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.audit_events import (
    Findings,
    Replay,
    a_count,
    a_list,
    a_number,
    a_text,
    a_version,
    parse,
    parse_events,
    read_lines,
)
from slipstream.core.mistakes import UserError
from slipstream.core.records import WeightVersion

CHECKS = {
    "format": "every record can be read",
    "staleness": "no weight on a token over a bound, from a rolled-back future, or not written by the policy",
    "once": "every sample is in one batch at most, every group is committed once",
    "ledger": "dispatched = trained + stale + filtered + failed + live, as the summary says",
    "slots": "never more than (bound + 1) · groups_per_step groups hold a slot",
    "batches": "batches are committed in order, each of groups_per_step groups (the last may be short)",
    "versions": "no dispatch ahead of what every engine has confirmed, no confirmation ahead of the learner",
}

_FIELDS: dict[str, Callable[[Any], Any]] = {
    "sample_id": a_text,
    "group_id": a_text,
    "batch": a_count,
    "assembled_at": a_version,
    "outcome": a_text,
    "token_ids": a_list,
    "behaviour_logprobs": a_list,
}
_COLUMNS: dict[str, Callable[[Any], Any]] = {
    "loss_mask": a_number,
    "versions": a_version,
    "kv_versions": a_version,
    "weights": a_number,
}

Run = tuple[Any, int, int]
"""Value, start, end: response tokens ``[start, end)`` share the value."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """``problems`` has one line per failed check, its first offenders named; ``figures`` is what was measured on the way."""

    ok: bool
    problems: list[str]
    figures: dict[str, Any]

    def render(self) -> str:
        """For a terminal: every check with its verdict, the problems, the figures."""
        failed = {problem.split(":", 1)[0]: problem for problem in self.problems}
        lines = [f"{'FAIL' if check in failed else 'ok  '}  {check:<10} {rule}" for check, rule in CHECKS.items()]
        lines += ["", *self.problems] if self.problems else []
        lines += ["", *(f"{name:<24} {_plain(value)}" for name, value in self.figures.items())]
        return "\n".join(lines)


def audit(run_dir: Path) -> AuditReport:
    """Check the records of a run, finished or not; a run on demonstrations only has no bound and no ledger to check.

    Raises UserError if ``run_dir`` has no ``events.jsonl``."""
    events_file, samples_file = run_dir / "events.jsonl", run_dir / "samples.jsonl"
    if not events_file.is_file():
        raise UserError(
            f"run directory: {run_dir} has no events.jsonl, expected the directory of a run such as runs/quickstart"
        )
    findings = Findings()
    replay = Replay(parse_events(read_lines(events_file, findings), findings), findings)
    if not replay.started:
        findings.add("format", "events.jsonl has no start event")
    samples = _Samples(replay, findings)
    if samples_file.is_file():
        for where, record in read_lines(samples_file, findings):
            samples.add(where, record)
    elif replay.committed:
        findings.add("ledger", "samples.jsonl is missing: run with monitor.samples: true to make the run auditable")
    samples.check_complete()
    ledger = _ledger(replay, samples, findings)
    if replay.ended and replay.rollouts and (run_dir / "summary.json").is_file():
        _compare(ledger, run_dir / "summary.json", findings)
    problems = findings.problems()
    return AuditReport(not problems, problems, _figures(replay, samples, ledger, findings))


class _Samples:
    """The samples of the committed batches, one record at a time."""

    def __init__(self, replay: Replay, findings: Findings) -> None:
        self._replay = replay
        self._findings = findings
        self._seen: set[str] = set()
        self._of_group: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.rolled_back = self.uncommitted = 0
        self.lags: Counter[int] = Counter()  # tokens that the policy wrote, by lag
        self.trained_lag_max = 0
        self.kv_lag_sum = self.masked = 0
        self.versions: Counter[int] = Counter()  # samples, by how many versions wrote them

    def add(self, where: str, record: dict[str, Any]) -> None:
        try:
            sample = parse(record, _FIELDS)
            columns = [_runs(record, name, convert, len(sample["token_ids"])) for name, convert in _COLUMNS.items()]
            if len(sample["behaviour_logprobs"]) != len(sample["token_ids"]):
                raise ValueError(f"{len(sample['behaviour_logprobs'])} log-probs for {len(sample['token_ids'])} tokens")
        except ValueError as error:
            self._findings.add("format", f"{where}: {error}")
            return
        name, group_id, batch, assembled = (sample[k] for k in ("sample_id", "group_id", "batch", "assembled_at"))
        if any(resume.attempt > assembled.attempt and batch > resume.batch for resume in self._replay.resumes):
            self.rolled_back += 1
            return
        if name in self._seen:
            self._findings.add("once", f"{where}: {name} is in a second batch, {batch}")
        self._seen.add(name)
        self._check_tokens(f"{where} {name}", assembled, columns, sample["outcome"])
        commit = self._replay.commits.get(batch)
        if commit is None and batch == max(self._replay.commits, default=0) + 1:
            self.uncommitted += 1  # the run stopped while it trained this batch
        elif commit is None or group_id not in commit.groups or assembled.next() != commit.version:
            self._findings.add("ledger", f"{where}: no commit holds {name}, assembled at {assembled} for batch {batch}")
        else:
            self._of_group[group_id] += 1
            self.outcomes[sample["outcome"]] += 1

    def _check_tokens(self, who: str, assembled: WeightVersion, columns: Sequence[Sequence[Run]], outcome: str) -> None:
        weighted, fresh, written_by = False, False, set()
        for start, end, (mine, version, kv_version, weight) in _segments(columns):
            lag, kv_lag = assembled.batch - version.batch, assembled.batch - kv_version.batch
            written_by.add(version)
            if mine:
                self.lags[lag] += end - start
                self.kv_lag_sum += kv_lag * (end - start)
                beyond = self._beyond(lag, kv_lag)
                fresh |= not beyond
                self.masked += bool(beyond) * (end - start)
            if weight == 0:
                continue
            weighted = True
            self.trained_lag_max = max(self.trained_lag_max, lag)
            problem = self._unfit(mine, version, assembled) or self._beyond(lag, kv_lag)
            if problem:
                self._findings.add("staleness", f"{who}: tokens {start} to {end - 1} weigh {weight} and {problem}")
        self.versions[len(written_by)] += 1
        if outcome not in (("trained",) if weighted else ("stale", "filtered")):
            state = "a" if weighted else "no"
            self._findings.add("ledger", f"{who} counts as {outcome!r}, but {state} token of it has weight")
        elif outcome == ("stale" if fresh else "filtered"):
            state = "a" if fresh else "no"
            self._findings.add("ledger", f"{who} counts as {outcome!r}, but {state} token of it is within the bound")

    def _beyond(self, lag: int, kv_lag: int) -> str | None:
        """Which bound a token of these lags is over."""
        bound, kv_bound = self._replay.bound, self._replay.kv_bound
        if lag > bound:
            return f"lag by {lag}, over the bound of {bound}"
        if kv_bound is not None and kv_lag > kv_bound:
            return f"attended to KV entries that lag by {kv_lag}, over the bound of {kv_bound}"
        return None

    def _unfit(self, mine: int, version: WeightVersion, assembled: WeightVersion) -> str | None:
        """Why a token of ``version`` must not be trained in a batch assembled at ``assembled``."""
        later = [resume.batch for resume in self._replay.resumes if version.attempt < resume.attempt]
        if not mine:
            return "were not written by the policy"
        if version > assembled:
            return f"are of {version}, newer than the learner's {assembled}"
        if version.batch > min(later, default=version.batch):
            return f"are of {version}, which was rolled back to batch {min(later)}"
        return None

    def check_complete(self) -> None:
        """Every committed group has as many records as it had samples."""
        for group_id, dispatched in self._replay.committed.items():
            if self._of_group[group_id] != dispatched:
                found = self._of_group[group_id]
                self._findings.add("ledger", f"{group_id} was committed with {dispatched} samples, samples.jsonl has {found}")


def _runs(record: dict[str, Any], name: str, convert: Callable[[Any], Any], length: int) -> list[Run]:
    """A column of runs.  Raises ValueError unless they tile ``[0, length)``."""
    runs, position = [], 0
    for run in record.get(name) or []:
        if not isinstance(run, list) or len(run) != 3 or run[1] != position or not position < run[2] <= length:
            raise ValueError(f"{name!r}: run {run} does not follow token {position} of {length}")
        runs.append((convert(run[0]), position, run[2]))
        position = run[2]
    if position != length:
        raise ValueError(f"{name!r}: runs cover {position} of {length} tokens")
    return runs


def _segments(columns: Sequence[Sequence[Run]]) -> Iterator[tuple[int, int, list[Any]]]:
    """``(start, end, value of each column)`` wherever any column changes; the columns tile the same tokens."""
    at, start = [0] * len(columns), 0
    for end in sorted({run[2] for column in columns for run in column}):
        yield start, end, [column[i][0] for column, i in zip(columns, at, strict=True)]
        at = [i + (column[i][2] == end) for column, i in zip(columns, at, strict=True)]
        start = end


def _ledger(replay: Replay, samples: _Samples, findings: Findings) -> dict[str, int]:
    ledger = {
        "dispatched": replay.totals["dispatched"],
        "trained": samples.outcomes["trained"],
        "stale": samples.outcomes["stale"] + replay.totals["stale"],
        "filtered": samples.outcomes["filtered"] + replay.totals["filtered"],
        "failed": replay.totals["failed"],
        "live": sum(flight.samples for flight in replay.live.values()),
    }
    accounted = sum(ledger.values()) - ledger["dispatched"]
    if accounted != ledger["dispatched"]:
        findings.add("ledger", f"{ledger['dispatched']} samples were dispatched, {accounted} are accounted for")
    return ledger


def _compare(ledger: dict[str, int], summary_file: Path, findings: Findings) -> None:
    """The ledger that the run itself kept says the same."""
    try:
        kept = json.loads(summary_file.read_text())["ledger"]
        if kept is None:  # the process that kept it died: nothing to compare
            return
        kept = {**kept, "live": kept["in_flight"] + kept["ready"] + kept["training"]}
    except (ValueError, KeyError, TypeError):
        findings.add("format", "summary.json has no ledger that can be read")
        return
    for state, found in ledger.items():
        if kept.get(state) != found:
            findings.add("ledger", f"{state}: summary.json says {kept.get(state)}, the records {found}")


def _figures(replay: Replay, samples: _Samples, ledger: dict[str, int], findings: Findings) -> dict[str, Any]:
    tokens = sum(samples.lags.values())
    return {
        "bound": replay.bound,
        "token_mean": sum(lag * n for lag, n in samples.lags.items()) / max(tokens, 1),
        "token_max": max(samples.lags, default=0),
        "trained_token_max": samples.trained_lag_max,
        "masked_frac": samples.masked / max(tokens, 1),
        "kv_mean": samples.kv_lag_sum / max(tokens, 1),
        "versions_per_sample_max": max(samples.versions, default=0),
        "mixed_version_samples": sum(n for versions, n in samples.versions.items() if versions > 1),
        "samples": sum(samples.versions.values()),
        "batches": len(replay.commits),
        "slots_held_max": replay.held_max,
        "slots": replay.slots,
        "ledger": ledger,
        "resumes": len(replay.resumes),
        "rolled_back_samples": samples.rolled_back,
        "uncommitted_samples": samples.uncommitted,
        "torn": findings.torn,
    }


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " · ".join(f"{name} {number}" for name, number in value.items())
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
