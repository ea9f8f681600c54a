"""The audit passes good runs, figures worked by hand, and catches every rule's broken variants."""

import json
from copy import deepcopy

import pytest

from slipstream.core.audit import CHECKS, audit

# Bound 1, 2 groups per step: 4 slots.  2 samples per group, 2 engines.
START = {"kind": "start", "attempt": 0, "bound": 1, "on_stale": "mask", "groups_per_step": 2, "group_size": 2}


def dispatch(version, *groups):
    return [{"kind": "dispatch", "group_id": g, "version": version, "samples": 2} for g in groups]


def ready(*groups):
    return [{"kind": "ready", "group_id": g, "oldest": "0.0"} for g in groups]


def leave(kind, group):
    return [{"kind": kind, "group_id": group, "samples": 2, "reason": "because"}]


def commit(version, *groups):
    return [{"kind": "commit", "batch": int(version.split(".")[1]), "version": version, "groups": list(groups)}]


def confirmed(version, engines=(0, 1)):
    return [{"kind": "confirmed", "version": version, "pause_s": 0.1, "engine": e} for e in engines]


def sample(name, assembled_at, versions, weights, outcome="trained"):
    """Four tokens, the third of which is an observation."""
    return {
        "batch": int(assembled_at.split(".")[1]) + 1,
        "assembled_at": assembled_at,
        "sample_id": name,
        "group_id": name.split("#")[0],
        "prompt_ids": [1, 2],
        "token_ids": [5, 6, 7, 8],
        "loss_mask": [[1, 0, 2], [0, 2, 3], [1, 3, 4]],
        "versions": versions,
        "kv_versions": [[versions[0][0], 0, 4]],
        "weights": weights,
        "behaviour_logprobs": [-0.5, -0.1, 0.0, -0.2],
        "reward": 1.0,
        "outcome": outcome,
    }


FRESH = [[1.0, 0, 2], [0.0, 2, 3], [1.0, 3, 4]]  # every token that the policy wrote
TAIL = [[0.0, 0, 3], [1.0, 3, 4]]


def both(group, assembled_at, version):
    return [sample(f"{group}#{k}", assembled_at, [[version, 0, 4]], FRESH) for k in range(2)]


HEAD_EVENTS = [
    START,
    *dispatch("0.0", "g0", "g1", "g2", "g3"),
    *ready("g0", "g1"),
    *leave("filtered", "g2"),
    *dispatch("0.0", "g4"),
    *commit("0.1", "g0", "g1"),
    *confirmed("0.1"),
    *dispatch("0.1", "g5", "g6"),
    *ready("g3", "g5"),
    *commit("0.2", "g3", "g5"),
]
HEAD_SAMPLES = [
    *both("g0", "0.0", "0.0"),
    *both("g1", "0.0", "0.0"),
    *[sample(f"g3#{k}", "0.1", [["0.0", 0, 2], ["0.1", 2, 4]], FRESH) for k in range(2)],
    *both("g5", "0.1", "0.1"),
]


def tail_events(attempt):
    """From batch 2 on; what follows a resume differs from what it would have been in the attempt only."""
    return [
        *dispatch(f"{attempt}.2", "g7", "g8"),
        *leave("failed", "g7"),
        *leave("stale", "g8"),
        *ready("g4", "g6"),
        *commit(f"{attempt}.3", "g4", "g6"),
        *confirmed(f"{attempt}.3"),
        *dispatch(f"{attempt}.3", "g9", "g10"),
        *ready("g9"),
        *commit(f"{attempt}.4", "g9"),
        *confirmed(f"{attempt}.4"),
        {"kind": "end", "status": "completed"},
    ]


def tail_samples(attempt):
    return [
        sample("g4#0", f"{attempt}.2", [["0.0", 0, 2], [f"{attempt}.2", 2, 4]], TAIL),
        sample("g4#1", f"{attempt}.2", [["0.0", 0, 4]], [[0.0, 0, 4]], "stale"),
        *both("g6", f"{attempt}.2", "0.1"),
        *both("g9", f"{attempt}.3", f"{attempt}.3"),
    ]


# Groups g0 … g10, two samples each.  g2 filtered, g7 failed, g8 stale, g10 still in flight; of the 14 others g4#1 is stale.
LEDGER = {"dispatched": 22, "in_flight": 2, "ready": 0, "training": 0, "trained": 13, "stale": 3, "filtered": 2, "failed": 2}

GOOD = {
    "events": [*HEAD_EVENTS, *confirmed("0.2"), *tail_events(0)],
    "samples": [*HEAD_SAMPLES, *tail_samples(0)],
    "summary": {"status": "completed", "ledger": LEDGER},
}
# Checkpoint of batch 2, a batch 3 of attempt 0 that is lost, then batches 3 and 4 again by attempt 1.
RESUMED = {
    "events": [
        *HEAD_EVENTS,
        {"kind": "checkpoint", "batch": 2},
        *confirmed("0.2"),
        *dispatch("0.2", "g7"),
        *ready("g4", "g6"),
        *commit("0.3", "g4", "g6"),
        *confirmed("0.3", engines=[0]),
        {"kind": "resume", "attempt": 1, "batch": 2},
        *dispatch("1.2", "g4", "g6"),
        *tail_events(1),
    ],
    "samples": [*HEAD_SAMPLES, *tail_samples(1)],
    "summary": GOOD["summary"],
}


def written(folder, run):
    for name in ("events", "samples"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in run[name]))
    (folder / "summary.json").write_text(json.dumps(run["summary"]))
    return folder


def position(run, **fields):
    """Index of the first event with these fields."""
    return next(i for i, e in enumerate(run["events"]) if fields.items() <= e.items())


def sample_of(run, name):
    return next(s for s in run["samples"] if s["sample_id"] == name)


def test_good_run(tmp_path):
    report = audit(written(tmp_path, GOOD))
    assert report.problems == [] and report.ok
    # Three written tokens per sample.  Lag 0: 12 (batch 1) + 2 (g3) + 6 (g5) + 1 (g4#0) + 6 (g9) = 27; lag 1: 4 (g3) + 6 (g6)
    # = 10; lag 2: 2 (g4#0) + 3 (g4#1) = 5; 42 in all.  KV lag: 6 (g3) + 12 (g4) + 6 (g6) = 24.
    assert report.figures == {
        "bound": 1,
        "token_mean": pytest.approx((10 + 2 * 5) / 42),
        "token_max": 2,
        "trained_token_max": 1,
        "masked_frac": pytest.approx(5 / 42),
        "kv_mean": pytest.approx(24 / 42),
        "versions_per_sample_max": 2,
        "mixed_version_samples": 3,  # both of g3, and g4#0
        "samples": 14,
        "batches": 4,
        "slots_held_max": 4,
        "slots": 4,
        "ledger": {"dispatched": 22, "trained": 13, "stale": 3, "filtered": 2, "failed": 2, "live": 2},
        "resumes": 0,
        "rolled_back_samples": 0,
        "uncommitted_samples": 0,
        "torn": [],
    }
    text = report.render()
    assert "FAIL" not in text and "dispatched 22 · trained 13" in text and "slots_held_max" in text


@pytest.mark.parametrize("lost_samples_kept", [False, True])
def test_good_resumed_run(tmp_path, lost_samples_kept):
    run = deepcopy(RESUMED)
    run["events"][position(run, kind="resume")] = {**START, "attempt": 1, "resumed_from": 2}  # the other way to write it
    if lost_samples_kept:  # the crash came before samples.jsonl was cut back to the checkpoint
        run["samples"][8:8] = [*both("g4", "0.2", "0.0"), *both("g6", "0.2", "0.1")]
    report = audit(written(tmp_path, run))
    assert report.problems == []
    assert report.figures["ledger"] == {"dispatched": 22, "trained": 13, "stale": 3, "filtered": 2, "failed": 2, "live": 2}
    assert report.figures["resumes"] == 1 and report.figures["rolled_back_samples"] == 4 * lost_samples_kept


def test_unfinished_run(tmp_path):
    """Killed while it trained batch 3, after its samples were written; a summary of an earlier end does not count."""
    run = deepcopy(GOOD)
    del run["events"][position(run, batch=3) :]
    del run["samples"][-2:]
    run["summary"]["ledger"]["trained"] = 99
    report = audit(written(tmp_path, run))
    assert report.problems == []
    assert report.figures["uncommitted_samples"] == 4
    # g0 … g8 were dispatched; g4 and g6 are live
    assert report.figures["ledger"] == {"dispatched": 18, "trained": 8, "stale": 2, "filtered": 2, "failed": 2, "live": 4}


def test_run_on_demonstrations_has_no_groups(tmp_path):
    run = {"events": [START, *confirmed("0.0"), *confirmed("0.7"), {"kind": "end"}], "samples": []}
    assert audit(written(tmp_path, {**run, "summary": {"ledger": LEDGER}})).ok


@pytest.mark.parametrize("name", ["events", "samples"])
def test_torn_last_line_is_reported_and_no_problem(tmp_path, name):
    folder = written(tmp_path, GOOD)
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write('{"kind": "dispatch", "group_')
    report = audit(folder)
    assert report.ok and report.figures["torn"] == [f"{name}.jsonl"]


# ---- broken variants: (check, part of the message, what breaks it)

BROKEN = []


def broken(check, message, base=GOOD):
    def register(change):
        BROKEN.append(pytest.param(check, message, base, change, id=change.__name__))
        return change

    return register


@broken("staleness", "g4#0: tokens 0 to 1 weigh 1.0 and lag by 2, over the bound of 1")
def weight_over_the_bound(run):
    sample_of(run, "g4#0")["weights"] = FRESH


@broken("staleness", "g6#0: tokens 0 to 1 weigh 1.0 and attended to KV entries that lag by 2, over the bound of 1")
def weight_over_the_bound_of_kv_entries(run):
    """g6 is of 0.1, in a batch assembled at 0.2; its request was admitted at 0.0."""
    run["events"][0]["kv_bound"] = 1
    sample_of(run, "g4#0").update(weights=[[0.0, 0, 4]], outcome="stale")
    sample_of(run, "g6#0")["kv_versions"] = [["0.0", 0, 4]]


@broken("staleness", "g5#1: tokens 2 to 2 weigh 0.5 and were not written by the policy")
def weight_on_an_observation(run):
    sample_of(run, "g5#1")["weights"] = [[1.0, 0, 2], [0.5, 2, 3], [1.0, 3, 4]]


@broken("staleness", "g6#0: tokens 0 to 1 weigh 1.0 and are of 0.3, newer than the learner's 0.2")
def token_of_a_newer_version(run):
    sample_of(run, "g6#0")["versions"] = [["0.3", 0, 4]]


@broken("staleness", "g9#0: tokens 0 to 1 weigh 1.0 and are of 0.3, which was rolled back to batch 2", RESUMED)
def token_from_a_rolled_back_future(run):
    sample_of(run, "g9#0")["versions"] = [["0.3", 0, 4]]


@broken("once", "g0#0 is in a second batch, 4")
def sample_trained_twice(run):
    run["samples"].append({**sample_of(run, "g0#0"), "batch": 4, "assembled_at": "0.3"})


@broken("ledger", "g5 was committed with 2 samples, samples.jsonl has 1")
def sample_missing(run):
    run["samples"].remove(sample_of(run, "g5#0"))


@broken("ledger", "22 samples were dispatched, 21 are accounted for")
def samples_do_not_add_up(run):
    run["samples"].remove(sample_of(run, "g5#0"))


@broken("ledger", "1 samples of g2 are filtered, but 2 samples were dispatched")
def part_of_a_group_filtered(run):
    run["events"][position(run, kind="filtered")]["samples"] = 1


@broken("ledger", "no commit holds g10#0, assembled at 0.3 for batch 4")
def sample_of_a_group_outside_its_batch(run):
    run["samples"].append(sample("g10#0", "0.3", [["0.3", 0, 4]], FRESH))


@broken("ledger", "no commit holds g5#0, assembled at 1.1 for batch 2")
def sample_assembled_by_another_attempt(run):
    sample_of(run, "g5#0")["assembled_at"] = "1.1"


@broken("ledger", "no commit holds g5#0, assembled at 0.1 for batch 9")
def sample_of_a_batch_that_never_was(run):
    sample_of(run, "g5#0")["batch"] = 9


@broken("ledger", "g4#1 counts as 'trained', but no token of it has weight")
def stale_sample_called_trained(run):
    sample_of(run, "g4#1")["outcome"] = "trained"


@broken("ledger", "g4#1 counts as 'filtered', but no token of it is within the bound")
def stale_sample_called_filtered(run):
    sample_of(run, "g4#1")["outcome"] = "filtered"


@broken("ledger", "g5#0 counts as 'stale', but a token of it is within the bound")
def fresh_sample_called_stale(run):
    sample_of(run, "g5#0").update(outcome="stale", weights=[[0.0, 0, 4]])


@broken("ledger", "trained: summary.json says 14, the records 13")
def summary_says_otherwise(run):
    run["summary"]["ledger"]["trained"] = 14


@broken("ledger", "live: summary.json says 4, the records 2")
def summary_counts_others_live(run):
    run["summary"]["ledger"]["ready"] = 2


@broken("slots", "dispatches g5 as number 5 of 4")
def slot_freed_at_the_commit(run):
    """Dispatching at the commit, before the engines confirm, is how the bound was once missed."""
    events = run["events"]
    events.insert(
        position(run, version="0.1", kind="commit") + 1, {**events.pop(position(run, group_id="g5")), "version": "0.0"}
    )


@broken("batches", "batch 2 has 1 groups, expected 2")
def short_batch_in_the_middle(run):
    run["events"][position(run, batch=2)]["groups"] = ["g3"]


@broken("batches", "commits batch 9 as 0.1, expected batch 1 as 0.1")
def batch_and_version_differ(run):
    run["events"][position(run, batch=1)]["batch"] = 9


@broken("versions", "dispatches g5 at 0.2, but every engine holds only 0.1")
def dispatch_ahead_of_the_engines(run):
    run["events"][position(run, group_id="g5")]["version"] = "0.2"


@broken("format", "events.jsonl has no start event")
def no_start(run):
    del run["events"][0]


@broken("format", "events.jsonl:2 dispatch: 'samples' is missing")
def event_without_a_field(run):
    del run["events"][1]["samples"]


@broken("format", "samples.jsonl:1: 'weights': run [1.0, 3, 4] does not follow token 2 of 4")
def spans_with_a_hole(run):
    run["samples"][0]["weights"] = [[1.0, 0, 2], [1.0, 3, 4]]


@broken("format", "samples.jsonl:1: 'versions': runs cover 3 of 4 tokens")
def spans_too_short(run):
    run["samples"][0]["versions"] = [["0.0", 0, 3]]


@broken("format", "samples.jsonl:1: 3 log-probs for 4 tokens")
def log_probs_too_short(run):
    run["samples"][0]["behaviour_logprobs"] = [0.0] * 3


@broken("format", "summary.json has no ledger")
def summary_without_a_ledger(run):
    run["summary"] = {}


@pytest.mark.parametrize(("check", "message", "base", "change"), BROKEN)
def test_broken_run_is_caught(tmp_path, check, message, base, change):
    run = deepcopy(base)
    change(run)
    report = audit(written(tmp_path, run))
    assert not report.ok
    (problem,) = [p for p in report.problems if p.startswith(f"{check}: ")]
    assert message in problem
    assert f"FAIL  {check}" in report.render() and problem in report.render()


def test_every_check_has_a_broken_variant():
    assert {parameters.values[0] for parameters in BROKEN} == set(CHECKS)


def test_damaged_line_is_a_problem(tmp_path):
    folder = written(tmp_path, GOOD)
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    lines[3] = "{damaged\n"
    (folder / "samples.jsonl").write_text("".join(lines))
    assert any("samples.jsonl:4 is not a JSON object" in p for p in audit(folder).problems)


def test_missing_samples(tmp_path):
    folder = written(tmp_path, GOOD)
    (folder / "samples.jsonl").unlink()
    assert any("monitor.samples: true" in p for p in audit(folder).problems)


def test_offenders_are_counted_and_the_first_are_named(tmp_path):
    run = deepcopy(GOOD)
    for record in run["samples"][:8]:
        record["outcome"] = "stale"
    (problem,) = [p for p in audit(written(tmp_path, run)).problems if p.startswith("ledger")]
    # eight samples, and the two totals that the summary disagrees with
    assert problem.startswith("ledger: 10 found: samples.jsonl:1 g0#0 counts") and problem.endswith("; and 7 more")
    assert "g1#0" in problem and "g1#1" not in problem


def test_a_fresh_sample_may_be_filtered_within_its_batch(tmp_path):
    """It was cut off, and the recipe gives such no weight: one less trained, one more filtered."""
    run = deepcopy(GOOD)
    sample_of(run, "g0#0").update(outcome="filtered", weights=[[0.0, 0, 4]])
    run["summary"]["ledger"]["trained"] -= 1
    run["summary"]["ledger"]["filtered"] += 1
    assert audit(written(tmp_path, run)).problems == []


def test_a_sample_may_be_stale_for_its_kv_entries_alone(tmp_path):
    """The last token of g4#0 is fresh, but attended to entries of 0.0 at 0.2.  Masked: three tokens of g4#0, three of g4#1."""
    run = deepcopy(GOOD)
    run["events"][0]["kv_bound"] = 1
    sample_of(run, "g4#0").update(outcome="stale", weights=[[0.0, 0, 4]])
    run["summary"]["ledger"]["trained"] -= 1
    run["summary"]["ledger"]["stale"] += 1
    report = audit(written(tmp_path, run))
    assert report.problems == [] and report.figures["masked_frac"] == pytest.approx(6 / 42)


def test_not_a_run_directory(tmp_path):
    with pytest.raises(ValueError, match=r"has no events\.jsonl, expected the directory of a run"):
        audit(tmp_path)
