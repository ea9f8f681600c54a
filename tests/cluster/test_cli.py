"""The command as a user meets it, without starting anything heavy."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ray._private.services import find_gcs_addresses

COMMANDS = ("run", "validate", "resume", "eval", "export", "report", "audit", "doctor")
GOOD = "name: trial\nmodel: {path: 'builtin:tiny'}\ndata: {source: 'builtin:number_sorting'}\n"
BAD = """name: trial
model: {path: 'builtin:tiny', max_length: 64}
data: {source: 'builtin:number_sorting', sorce: x}
schedule: {steps: many, group_size: 500}
trainer: {optimizer: {lr: -1.0}}
rollout: {sampling: {max_tokens: 64}}
"""


def slipstream(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream.cluster.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(GOOD)
    return file


def test_all_mistakes_of_a_recipe_are_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(BAD)
    done = slipstream("validate", file, cwd=tmp_path)
    told = " ".join(done.stderr.split())
    assert done.returncode == 2 and "Traceback" not in told
    for key in ("data.sorce", "schedule.steps", "schedule.group_size", "trainer.optimizer.lr", "rollout.sampling.max_tokens"):
        assert key in told, f"{key} is missing in: {told}"
    assert "source" in told.split("data.sorce")[1], "did you mean source?"
    assert slipstream("run", file, cwd=tmp_path).returncode == 2 and not (tmp_path / "runs").exists()


def test_a_mistake_ends_with_2_and_a_fault_of_ours_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from slipstream.cluster import cli
    from slipstream.core.mistakes import UserError

    def fails(problem: Exception) -> None:
        def app() -> None:
            raise problem

        monkeypatch.setattr(cli, "app", app)
        cli.main()

    with pytest.raises(SystemExit) as ended:
        fails(UserError("schedule.steps: got -5"))
    assert ended.value.code == 2 and "schedule.steps: got -5" in capsys.readouterr().err
    with pytest.raises(ValueError, match="shorter"):
        fails(ValueError("zip() argument 2 is shorter than argument 1"))


def test_validate_says_what_it_has_not_looked_at(recipe: Path) -> None:
    (recipe.parent / "mine.py").write_text("raise SystemExit('imported')\nclass Host: ...\n")
    done = slipstream("validate", recipe, "rollout.environment.name=mine:Host", cwd=recipe.parent)
    assert done.returncode == 0 and "not checked yet (your code is only imported by `run`): mine:Host" in done.stdout
    assert "imported" not in slipstream("validate", recipe, cwd=recipe.parent).stdout


def test_validate_is_quick_and_imports_nothing_heavy(recipe: Path) -> None:
    """Measured in processor time as well as on the clock, since the machine may be busy."""
    code = (
        "import sys, time; from slipstream.cluster.cli import app; "
        f"app(['validate', {str(recipe)!r}], standalone_mode=False); "
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules); "
        "print('heavy', sorted(heavy)); print('seconds', time.process_time())"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    wall = time.perf_counter() - start
    assert "valid: trial, grpo on builtin:number_sorting" in done.stdout and "heavy []" in done.stdout
    seconds = float(done.stdout.split("seconds ")[1])
    assert seconds <= 2.0, f"{seconds} s of processor time ({wall:.1f} s on the clock)"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from slipstream.cluster.cli import app

    app([command, "--help"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "Usage:" in shown and f"slipstream {command}" in shown, "a usage line and an example"


def test_a_run_directory_is_never_written_twice(recipe: Path) -> None:
    there = recipe.parent / "runs" / "trial"
    there.mkdir(parents=True)
    done = slipstream("run", recipe, cwd=recipe.parent)
    told = " ".join(done.stderr.split())
    assert done.returncode == 2 and "slipstream resume runs/trial" in told and "name=trial-2" in told
    assert list(there.iterdir()) == []


def test_a_run_that_cannot_begin_leaves_its_name_free(recipe: Path) -> None:
    """No Ray answers at the address: a mistake of the user's, told within seconds, and no directory."""
    done = slipstream("run", recipe, "cluster.address=127.0.0.1:1", cwd=recipe.parent)
    assert done.returncode == 2 and "127.0.0.1:1" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (recipe.parent / "runs" / "trial").exists()


def test_a_ray_that_does_not_start_is_told_without_a_traceback(recipe: Path) -> None:
    if find_gcs_addresses():
        pytest.skip("a Ray runs on this machine, and would be found")
    done = slipstream("run", recipe, "cluster.address=auto", cwd=recipe.parent)
    told = " ".join(done.stderr.split())
    assert done.returncode == 1 and "Ray did not start" in told and "Traceback" not in told, done.stderr
    assert not (recipe.parent / "runs" / "trial").exists()


def test_a_ray_of_our_own_gets_three_attempts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its 30 s are Ray's own, and no setting's; a cluster that somebody else runs is asked once."""
    from slipstream.cluster import launch

    tried: list[str] = []

    def slow(address: str, **_: Any) -> None:
        tried.append(address)
        raise Exception("The current node timed out during startup")

    monkeypatch.setattr(launch.ray, "init", slow)
    for address, attempts in (("local", 3), ("auto", 1)):
        tried.clear()
        caplog.clear()
        with pytest.raises(launch.RunFailed, match="Ray did not start"):
            launch._start_ray(address)
        assert tried == [address] * attempts and len(caplog.records) == attempts - 1


@pytest.mark.parametrize("command", ["resume", "eval", "export", "report", "audit"])
def test_what_is_no_run_is_refused(command: str, tmp_path: Path) -> None:
    done = slipstream(command, tmp_path, *(["out"] if command == "export" else []), cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr and str(tmp_path) in "".join(done.stderr.split()), (
        done.stderr
    )


@pytest.mark.parametrize("command", ["resume", "eval", "export", "report", "audit"])
def test_a_run_that_is_not_there_is_told_with_those_that_are(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from slipstream.cluster import cli

    for name in ("quickstart", "sync"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.yaml").touch()
    monkeypatch.chdir(tmp_path)
    for path in ("runs/quickstrat", "quickstrat"):
        monkeypatch.setattr(sys, "argv", ["slipstream", command, path, *(["out"] if command == "export" else [])])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        told = capsys.readouterr().err
        assert ended.value.code == 2 and f"{path} does not exist" in told
        assert "runs/sync" in told and "runs/quickstart" in told and "did you mean quickstart?" in told


def test_a_run_that_failed_says_where_to_look_and_how_to_go_on(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where its report cannot be written: nothing hides the failure."""
    from slipstream.cluster import cli, launch

    run = recipe.parent / "runs" / "trial"

    def fails(recipe: Any, path: Path, **_: Any) -> None:
        (path / "events.jsonl").write_text('{"time": 1.0, "kind": "start"}\n')
        raise launch.RunFailed("all 9 groups failed: mine:f/raised")

    monkeypatch.setattr(launch, "launch", fails)
    monkeypatch.chdir(recipe.parent)
    monkeypatch.setattr(sys, "argv", ["slipstream", "run", str(recipe)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and told[0] == "failed: all 9 groups failed: mine:f/raised"
    assert told[1:] == ["run      runs/trial", "logs     runs/trial/logs", "report   runs/trial/report.html"]
    assert (run / "report.html").is_file()

    (run / "checkpoints" / "step-00000050").mkdir()
    (run / "events.jsonl").write_text("damaged\n")
    assert cli._where_to_look(Path("runs/trial")).splitlines()[2:] == ["next:", "  slipstream resume runs/trial"]


def test_the_next_commands_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.cluster import cli

    program = tmp_path / ".venv" / "bin" / "slipstream"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli._called() == ".venv/bin/slipstream"
    monkeypatch.setenv("PATH", str(program.parent))
    assert cli._called() == "slipstream"


def test_the_version_is_told(tmp_path: Path) -> None:
    done = slipstream("--version", cwd=tmp_path)
    assert done.returncode == 0 and re.fullmatch(r"slipstream \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize("arguments", [["run"], ["run", "--bogus"], ["nosuch"], ["export", "runs/x"]])
def test_a_wrong_command_line_is_told_in_words(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "recipe.yaml").touch()
    done = slipstream(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "Usage:" in done.stderr, done.stderr


def test_an_audit_that_fails_is_seen_in_the_exit_code(recipe: Path) -> None:
    """A sample of lag 1 with weight, where the bound is 0; the same with lag 0 passes."""
    run = recipe.parent / "runs" / "trial"
    for version, code in (("0.0", 1), ("0.1", 0)):
        shutil.rmtree(run, ignore_errors=True)
        events: list[dict[str, Any]] = [
            {"kind": "start", "attempt": 0, "bound": 0, "groups_per_step": 1},
            {"kind": "confirmed", "version": "0.0"},
            {"kind": "dispatch", "group_id": "a", "version": "0.0", "samples": 1},
            {"kind": "ready", "group_id": "a"},
            {"kind": "commit", "batch": 1, "version": "0.1", "groups": ["a"]},
            {"kind": "confirmed", "version": "0.1"},
            {"kind": "dispatch", "group_id": "b", "version": "0.1", "samples": 1},
            {"kind": "ready", "group_id": "b"},
            {"kind": "commit", "batch": 2, "version": "0.2", "groups": ["b"]},
        ]
        samples = [sample("a", 1, "0.0"), sample("b", 2, version)]
        run.mkdir(parents=True)
        for name, records in (("events", events), ("samples", samples)):
            (run / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        done = slipstream("audit", run, cwd=recipe.parent)
        assert done.returncode == code, done.stdout


def sample(group_id: str, batch: int, version: str) -> dict[str, Any]:
    return {
        "batch": batch,
        "assembled_at": f"0.{batch - 1}",
        "sample_id": f"{group_id}#0",
        "group_id": group_id,
        "outcome": "trained",
        "token_ids": [5],
        "behaviour_logprobs": [-0.5],
        "loss_mask": [[1, 0, 1]],
        "weights": [[1.0, 0, 1]],
        "versions": [[version, 0, 1]],
        "kv_versions": [[version, 0, 1]],
    }
