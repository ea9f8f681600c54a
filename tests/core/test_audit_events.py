"""Replaying event logs, written here as scripts: bound 1, two groups per step (so four slots), one sample per group."""

import pytest

from slipstream.core.audit_events import Findings, Replay, parse_events

START = {"kind": "start", "attempt": 0, "bound": 1, "groups_per_step": 2}


def events_of(script):
    """``dispatch VERSION GROUP …`` and so on, one per line; several groups or engines stand for several events."""
    yield "start", START
    for line in filter(None, map(str.strip, script.splitlines())):
        kind, *words = line.split()
        if kind == "dispatch":
            fields = [{"version": words[0], "group_id": g, "samples": 1} for g in words[1:]]
        elif kind == "commit":
            fields = [{"version": words[0], "batch": int(words[0].split(".")[1]), "groups": words[1:]}]
        elif kind == "confirmed":
            fields = [{"version": words[0], "engine": engine} for engine in words[1:]] or [{"version": words[0]}]
        elif kind == "resume":
            fields = [{"attempt": int(words[0]), "batch": int(words[1])}]
        elif kind == "checkpoint":
            fields = [{"batch": int(words[0])}]
        else:
            fields = [{"group_id": g, "samples": 1} for g in words] or [{}]
        yield from ((line, {"kind": kind, **f}) for f in fields)


def replayed(script):
    findings = Findings()
    return Replay(parse_events(events_of(script), findings), findings), findings.problems()


FIRST_BATCH = """
dispatch 0.0 a b c d
ready a b c
commit 0.1 a b
"""
TWO_BATCHES = f"""{FIRST_BATCH}
confirmed 0.1
dispatch 0.1 e f
ready d
commit 0.2 c d
"""


@pytest.mark.parametrize(
    "script",
    [
        f"{TWO_BATCHES} confirmed 0.2 \n dispatch 0.2 g h",
        f"{FIRST_BATCH} confirmed 0.1 x y \n dispatch 0.1 e f",  # two engines
        f"{FIRST_BATCH} failed c \n dispatch 0.0 c",  # a retry keeps its id, after a failure …
        f"{FIRST_BATCH} stale d \n dispatch 0.0 d",  # … or an abort
        f"{FIRST_BATCH} filtered d \n dispatch 0.0 e",  # its slot is free at once
        "dispatch 0.0 a \n ready a \n commit 0.1 a",  # the last batch may be short
        "dispatch 0.0 a b c \n ready a b c \n commit 0.1 a \n end \n resume 1 1 \n commit 1.2 b c",  # and that of an attempt
        "commit 0.1 \n confirmed 0.1 \n commit 0.2 \n confirmed 0.3",  # demonstrations only
        "unknown a \n end",
        f"{FIRST_BATCH} resume 1 0 \n dispatch 1.0 a b c d",  # no checkpoint yet: from the start
        f"{TWO_BATCHES} resume 1 1 \n dispatch 1.1 d e f",  # back to batch 1: c is ready, d in flight, e and f never were
        f"{FIRST_BATCH} confirmed 0.1 \n dispatch 0.1 e \n filtered e \n resume 1 1 \n dispatch 1.1 e",  # forgotten, then again
        f"{TWO_BATCHES} resume 1 2 \n resume 2 1 \n dispatch 2.1 d e f \n ready d \n commit 2.2 c d",
        f"{FIRST_BATCH} confirmed 0.1 \n dispatch 0.1 e \n checkpoint 1 \n resume 1 1 \n dispatch 1.1 d e f",
    ],
)
def test_good_logs(script):
    assert replayed(script)[1] == []


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("dispatch 0.0 a b c d e", "slots: 1 found: dispatch 0.0 a b c d e dispatches e as number 5 of 4"),
        (f"{FIRST_BATCH} dispatch 0.0 e", "slots: 1 found: dispatch 0.0 e dispatches e as number 5 of 4"),
        # engine y holds the slot of a and b; it confirms too late
        (f"{FIRST_BATCH} confirmed 0.1 x \n dispatch 0.0 e \n confirmed 0.1 y", "slots: 1 found: dispatch 0.0 e"),
        # ready c and the four that a resumed run dispatched
        (f"{FIRST_BATCH} resume 1 1 \n dispatch 1.1 d e f g", "slots: 1 found: dispatch 1.1 d e f g dispatches g as number 5"),
        (
            f"{FIRST_BATCH} filtered d \n dispatch 0.1 e",
            "versions: 1 found: dispatch 0.1 e dispatches e at 0.1, but every engine",
        ),
        (
            f"{FIRST_BATCH} filtered d \n confirmed 0.1 x \n dispatch 0.1 e \n confirmed 0.1 y",
            "versions: 1 found: dispatch 0.1 e",
        ),
        (f"{FIRST_BATCH} resume 1 1 \n dispatch 1.2 e", "versions: 1 found: dispatch 1.2 e"),
        (f"{TWO_BATCHES} confirmed 0.2 \n confirmed 0.1", "confirms 0.1, expected one between the engine's 0.2 and 0.2"),
        (f"confirmed 0.1 \n {FIRST_BATCH}", "versions: 1 found: confirmed 0.1 confirms 0.1, expected one between"),
        ("dispatch 0.0 a \n ready a \n commit 0.1", "batches: 1 found: commit 0.1: batch 1 has 0 groups, expected 2"),
        (f"{FIRST_BATCH} ready d \n commit 0.2 c \n commit 0.3 d", "batches: 1 found: commit 0.2 c: batch 2 has 1 groups"),
        ("dispatch 0.0 a b c \n ready a b c \n commit 0.1 a b c", "batches: 1 found: commit 0.1 a b c: batch 1 has 3 groups"),
        (
            "dispatch 0.0 a b \n ready a b \n commit 0.2 a b",
            "batches: 1 found: commit 0.2 a b commits batch 2 as 0.2, expected",
        ),
        (
            f"{FIRST_BATCH} ready d \n resume 1 1 \n ready d \n commit 0.2 c d",
            "commits batch 2 as 0.2, expected batch 2 as 1.2",
        ),
        (f"{FIRST_BATCH} resume 1 4", "batches: 1 found: resume 1 4 resumes from batch 4, which was not committed"),
        (f"{TWO_BATCHES} resume 1 1 \n resume 2 2", "resumes from batch 2, which was not committed"),  # batch 2 was rolled back
        ("dispatch 0.0 a a", "once: 1 found: dispatch 0.0 a a dispatches a again"),
        (f"{FIRST_BATCH} confirmed 0.1 \n dispatch 0.1 a", "once: 1 found: dispatch 0.1 a dispatches a again"),
        ("dispatch 0.0 a \n filtered a \n dispatch 0.0 a", "once: 1 found: dispatch 0.0 a dispatches a again"),
        (f"{FIRST_BATCH} resume 1 1 \n dispatch 1.1 d d", "once: 1 found: dispatch 1.1 d d dispatches d again"),
        (f"{FIRST_BATCH} resume 1 1 \n dispatch 1.1 a", "once: 1 found: dispatch 1.1 a dispatches a again"),
        (f"{FIRST_BATCH} commit 0.2 c a", "once: 1 found: commit 0.2 c a: a is committed again"),
        (f"{FIRST_BATCH} commit 0.2 c d", "ledger: 1 found: commit 0.2 c d: d is committed, but was not ready"),
        (f"{FIRST_BATCH} resume 1 1 \n commit 1.2 c d", "ledger: 1 found: commit 1.2 c d: d is committed, but was not ready"),
        ("ready a", "ledger: 1 found: ready a: a is ready, but not in flight"),
        ("dispatch 0.0 a \n failed a \n stale a", "ledger: 1 found: stale a: 1 samples of a are stale, but it is not live"),
    ],
)
def test_broken_logs(script, problem):
    (found,) = replayed(script)[1]
    assert problem in found


def test_state_after_a_resume_is_that_of_the_checkpoint():
    replay, _ = replayed(
        f"{FIRST_BATCH} filtered d \n checkpoint 1 \n confirmed 0.1 \n dispatch 0.1 e \n failed e \n resume 1 1"
    )
    assert replay.totals == {"dispatched": 4, "filtered": 1}
    assert set(replay.live) == {"c"} and replay.committed == {"a": 1, "b": 1}
    assert replay.resumes == [(1, 1)] and replay.held == 1 and replay.held_max == 4


def test_without_a_checkpoint_event_the_commit_is_what_a_resume_goes_back_to():
    replay, _ = replayed(f"{FIRST_BATCH} filtered d \n resume 1 1")
    assert replay.totals == {"dispatched": 4} and set(replay.live) == {"c", "d"}
    assert replay.held == 1  # d holds no slot until it is dispatched again
