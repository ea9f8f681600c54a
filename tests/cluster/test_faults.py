"""Whatever dies, the command ends soon, says what it was, leaves nothing running, and the run can go on.

One run that Ctrl-C interrupts; every fault then strikes a resume of it, so each test is a test of resuming as well.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.cluster.staging import staging
from slipstream.core.audit import audit
from slipstream.core.rundir import read_jsonl

pytestmark = pytest.mark.cluster
Start = Callable[..., Any]
END_S = 60.0
"""So soon after a death the command has ended."""
FOREVER = "schedule.steps=100000"
RAYS_OWN_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes of Ray that notice a dead raylet only after a minute."""


@pytest.fixture(scope="module")
def interrupted(start: Start) -> Any:
    """A run without end that got Ctrl-C, as a terminal sends it: to the whole process group."""
    command = start("story", FOREVER, "schedule.max_staleness=1", "schedule.on_stale=drop")
    command.until_commits(3)
    os.killpg(command.pid, signal.SIGINT)
    command.code = command.wait(END_S)
    return command


@pytest.fixture
def resume(interrupted: Any, start: Start) -> Callable[..., Any]:
    return lambda *overrides: start("story", *overrides, resume=True)


def assert_clean(command: Any) -> None:
    assert command.survivors(30.0) == [] and command.staged() == []
    report = audit(command.run)
    assert report.ok, report.problems


def test_ctrl_c_ends_the_step_and_keeps_a_checkpoint(interrupted: Any) -> None:
    assert interrupted.code == 130, interrupted.output()
    summary = interrupted.summary()
    assert (summary["status"], summary["error"]) == ("interrupted", None)
    newest = max(path.name for path in (interrupted.run / "checkpoints").glob("step-*"))
    commits = interrupted.events("commit")
    kept = [event["batch"] for event in interrupted.events("checkpoint")]
    assert kept == [commit["batch"] for commit in commits], "each batch once, the last one too"
    assert newest == f"step-{summary['version']:08d}" and commits[-1]["batch"] == summary["version"]
    assert "slipstream resume runs/story\n" in interrupted.output()
    assert summary["staleness"]["trained_token_max"] <= 1 and summary["staleness"]["masked_frac"] == 0.0, "drop masks nothing"
    assert_clean(interrupted)


@pytest.mark.parametrize(
    ("role", "named"),
    [
        ("engine", r"an engine's process \d+ died"),
        ("engine core", "vLLM's engine core has died|EngineDeadError"),
        ("learner", r"the learner's process \d+ died"),
        ("controller", r"the controller's process \d+ died"),
    ],
)
def test_a_death_in_the_middle_of_the_training(resume: Callable[..., Any], role: str, named: str) -> None:
    command = resume()
    command.until_commits(2)
    command.process(role).send_signal(signal.SIGKILL)
    killed = time.monotonic()
    assert command.wait(END_S) == 1, command.output()
    print(f"{role}: the command ended after {time.monotonic() - killed:.1f} s")
    summary = command.summary()
    assert summary["status"] == "failed"
    assert re.search(named, summary["error"]), summary["error"]
    (end,) = command.news("end")
    assert (end["status"], end["error"]) == ("failed", summary["error"])
    assert_clean(command)


@pytest.mark.slow
def test_the_driver_dies(start: Start) -> None:
    """Nothing of ours outlives it; what it staged is removed by the next run on the machine."""
    command = start("waiting", FOREVER, "schedule.max_staleness=1", "schedule.on_stale=wait")
    command.until_commits(4)
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    assert command.survivors(30.0, but=RAYS_OWN_AGENTS) == []
    with staging("the-next-run"):
        assert command.staged() == []
    report = audit(command.run)
    assert report.ok, report.problems
    lines = read_jsonl(command.run / "metrics.jsonl").records
    assert len(lines) >= 3 and all(metric["staleness/token_max"] <= 1 for metric in lines), "the learner waits, none is masked"


def test_a_damaged_checkpoint_is_passed_over_and_equal_rewards_end_the_run(
    interrupted: Any, resume: Callable[..., Any], workshop: Path
) -> None:
    newest, older = sorted((interrupted.run / "checkpoints").glob("step-*"), reverse=True)[:2]
    weights = max((newest / "learner" / "model").glob("*.safetensors"))
    with weights.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    (workshop / "solved").touch()
    command = resume("schedule.max_idle_groups=10")
    assert command.wait() == 1
    (workshop / "solved").unlink()
    (warning,) = command.news("warning")
    assert f"{newest.name} is damaged: learner/model/{weights.name}: SHA-256" in warning["message"]
    assert command.news("start")[0]["resumed_from"] == int(older.name.removeprefix("step-"))
    error = command.summary()["error"]
    assert "no learning signal from the last 10 groups" in error and "had equal rewards, 0.5 throughout" in error
    assert_clean(command)


@pytest.fixture
def small_disk(interrupted: Any) -> Iterator[Path]:
    """A copy of the run, with its newest valid checkpoint on a disk that has room for one and a half."""
    from slipstream.trainer.checkpoint import latest

    run = interrupted.run.with_name("full")
    shutil.copytree(interrupted.run, run, ignore=shutil.ignore_patterns(".draft-*"))  # a death may have come in mid-writing
    valid, _ = latest(run / "checkpoints")
    assert valid is not None
    for path in (run / "checkpoints").glob("step-*"):
        if path != valid:
            shutil.rmtree(path)
    (run / "checkpoints" / "LATEST").write_text(valid.name)
    size = sum(file.stat().st_size for file in valid.rglob("*") if file.is_file())
    shutil.move(run / "checkpoints", run / "aside")
    (run / "checkpoints").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.5 * size)}", "tmpfs", str(run / "checkpoints")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        shutil.copytree(run / "aside", run / "checkpoints", dirs_exist_ok=True)
        yield run
    finally:
        subprocess.run(["umount", str(run / "checkpoints")], check=True)


def test_a_full_disk_fails_the_run_and_spares_the_old_checkpoint(small_disk: Path, start: Start) -> None:
    from slipstream.trainer.checkpoint import latest

    before, _ = latest(small_disk / "checkpoints")
    command = start("full", FOREVER, resume=True)
    assert command.wait() == 1, command.output()
    error = command.summary()["error"]
    assert "while the checkpoint of step" in error and "No space left on device" in error, error
    assert " ".join(error.split()) in " ".join(command.output().split()), "the terminal says what the summary says"
    assert latest(small_disk / "checkpoints") == (before, [])
    assert not list((small_disk / "checkpoints").glob(".draft-*")), "the half-written one is gone"
    assert_clean(command)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "code", "told"),
    [
        ("rollout.kv_cache_gib=1.0e-6", 1, "while an engine started; see logs/engine-*.log"),
        ("data.options={demonstrations: none}", 2, "demonstration"),
    ],
)
def test_a_part_that_cannot_start_ends_the_run_at_once(start: Start, mistake: str, code: int, told: str) -> None:
    """The engine fails while the learner waits for it; the learner lacks demonstrations while the engine is still loading."""
    command = start(f"start-{code}", mistake, "warm_start={steps: 1}")
    assert command.wait(240.0) == code, command.output()  # far below cluster.start_timeout_s on a machine that is not busy
    assert told in command.summary()["error"] and told.split()[0] in command.output()
    assert command.summary()["status"] == "failed" and command.survivors(30.0) == [] and command.staged() == []
