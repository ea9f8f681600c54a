"""The learner equals a plain loop, whatever the ranks, ZeRO stage, micro-batch size and packing order."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.trainer.distributed import free_port

HERE = Path(__file__).parent
FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2),
    "stage": (0, 1, 2, 3),
    "tokens": (16, 48, 4096),  # of a row: about a sample each; a few; all in one
    "order": ("given", "reversed", "shuffled"),  # of the samples, so of their packing
    "inner": ((1, 1), (3, 1), (1, 2)),  # epochs, mini-batches
    "tied": (False, True),
    "rule": ("grpo", "gspo", "rejecting", "loglinear", "taught", "ppo"),  # see `oracle.RULES`
}
CASES = [  # every pair of values of every two factors occurs (`test_cases_cover_all_pairs`)
    (1, 0, 16, "given", (3, 1), True, "grpo"),
    (1, 0, 16, "reversed", (1, 1), True, "rejecting"),
    (1, 0, 48, "given", (1, 2), False, "gspo"),
    (1, 1, 4096, "given", (3, 1), False, "loglinear"),
    (1, 1, 4096, "reversed", (1, 1), False, "grpo"),
    (1, 2, 48, "reversed", (3, 1), True, "loglinear"),
    (1, 3, 4096, "reversed", (1, 2), True, "gspo"),
    (1, 3, 48, "shuffled", (1, 1), False, "grpo"),
    (1, 3, 48, "shuffled", (3, 1), False, "rejecting"),
    (1, 0, 16, "given", (1, 1), False, "taught"),
    (1, 2, 4096, "shuffled", (1, 2), True, "taught"),
    (2, 0, 4096, "shuffled", (1, 2), True, "loglinear"),
    (2, 1, 16, "reversed", (3, 1), False, "grpo"),
    (2, 1, 16, "shuffled", (3, 1), True, "gspo"),
    (2, 1, 48, "reversed", (1, 2), False, "rejecting"),
    (2, 2, 16, "shuffled", (1, 2), False, "grpo"),
    (2, 2, 4096, "given", (1, 1), True, "rejecting"),
    (2, 2, 4096, "shuffled", (1, 1), True, "gspo"),
    (2, 3, 16, "given", (1, 1), False, "loglinear"),
    (2, 3, 48, "reversed", (3, 1), True, "gspo"),
    (2, 1, 48, "reversed", (3, 1), True, "taught"),
    (2, 3, 16, "reversed", (1, 2), False, "taught"),
    (1, 0, 16, "given", (1, 1), False, "ppo"),
    (1, 2, 4096, "shuffled", (1, 2), True, "ppo"),
    (2, 1, 48, "reversed", (3, 1), True, "ppo"),
    (2, 3, 16, "reversed", (1, 2), False, "ppo"),
]
SOMEWHERE = {
    "capped",
    "uncapped",
    "stale",
    "cross-entropy",
    "taught",
    "value: moves",
    "value: clipped",
    "icepop",
    "geometric",
    "opsm",
    "stopped early",
    "went on",
} | {
    f"{loss}: {branch}"
    for loss, branches in {
        "clipped_surrogate": ("moves", "clipped high", "clipped low", "dual clip"),
        "gspo": ("moves", "clipped high", "clipped low"),
        "dppo_tv": ("moves", "masked"),
        "cispo": ("moves", "clipped high", "clipped low"),
    }.items()
    for branch in branches
}


def test_cases_cover_all_pairs() -> None:
    for (i, first), (j, second) in itertools.combinations(enumerate(FACTORS.values()), 2):
        found = {(case[i], case[j]) for case in CASES}
        assert found == set(itertools.product(first, second))


@pytest.mark.learner
@pytest.mark.parametrize("ranks", FACTORS["ranks"])
def test_learner_equals_the_plain_loop(ranks: int, tmp_path: Path) -> None:
    """Largest relative error over five batches.  Float32 rounding alone leaves 1e-6; a token that enters with a wrong weight,
    ratio, mask or position changes a gradient by 1e-2 and more."""
    cases = [dict(zip(FACTORS, case, strict=True)) for case in CASES if case[0] == ranks]
    results = run_workers(cases, ranks, tmp_path)
    assert [result["case"] for result in results] == json.loads(json.dumps(cases))
    for result in results:
        errors = result["errors"]
        assert max(errors.values()) < 1e-5, result
        assert {"stale", "capped", "uncapped", "cross-entropy"} <= result["events"].keys()
    assert set().union(*(result["events"] for result in results)) >= SOMEWHERE, "a branch was not exercised"


def run_workers(cases: list[dict[str, Any]], ranks: int, folder: Path) -> list[dict[str, Any]]:
    """The worker's reports, after one process per rank has gone through all cases."""
    script, environment = HERE / "oracle_worker.py", {**os.environ, "OMP_NUM_THREADS": "1"}
    port = free_port()
    workers = []
    for rank in range(ranks):
        with (folder / f"rank{rank}.log").open("w") as log:
            arguments = [str(rank), str(ranks), str(port), str(folder), json.dumps(cases)]
            workers.append(subprocess.Popen([sys.executable, str(script), *arguments], env=environment, stdout=log, stderr=log))
    try:
        codes = [worker.wait(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    logs = [(folder / f"rank{rank}.log").read_text() for rank in range(ranks)]
    assert codes == [0] * ranks, "\n".join(log[-3000:] for log in logs)
    return [json.loads(line) for line in logs[0].splitlines() if line.startswith("{")]
