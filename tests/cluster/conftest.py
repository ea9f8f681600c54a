"""The command under watch: its events as they come, every process that it starts, what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

RECIPE = """
name: base
model: {path: 'builtin:tiny', max_length: 128}
data: {source: 'builtin:number_sorting'}
reward: {parts: [{function: 'scores:varied'}]}
rollout: {sampling: {temperature: 0.7, max_tokens: 96}, max_num_seqs: 64, kv_cache_gib: 0.25}
schedule: {groups_per_step: 4, group_size: 4}
trainer: {optimizer: {lr: 1.0e-3}}
checkpoint: {every: 1, keep: 3}
monitor: {eval: {size: 0}}
"""
SCORES = '''
from pathlib import Path

def varied(completion_ids, **_):
    """Differs between siblings, and moves the policy; equal once the file `solved` stands beside this one."""
    solved = Path(__file__).with_name("solved").exists()
    return [0.5 if solved else sum(ids) % 11 / 10 for ids in completion_ids]

def faulty(prompts, completion_ids, **_):
    if prompts[0][0] in "123":
        raise RuntimeError("no opinion on " + prompts[0][0])
    if prompts[0][0] in "45":
        return [0.5]
    return varied(completion_ids)
'''
ROLES = {
    "engine": "ray::RolloutActor",
    "engine core": "VLLM::EngineCore",
    "learner": "ray::LearnerActor",
    "controller": "ray::ControllerActor",
}


class Command:
    """``slipstream run`` or ``resume`` in a process group of its own, as a shell starts it."""

    def __init__(self, cwd: Path, run: Path, arguments: list[str]) -> None:
        self.run = run
        self.events_before = len(self.events())
        self._output = (cwd / f"{run.name}.{time.time_ns()}.out").open("w+")
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "slipstream.cluster.cli", *arguments],
            cwd=cwd,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._seen: dict[int, psutil.Process] = {}

    @property
    def pid(self) -> int:
        return self._driver.pid

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """All events of the run so far, or those of the given kinds; a line that is being written is left out."""
        file = self.run / "events.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        records = [json.loads(line) for line in lines]
        return [record for record in records if not kinds or record["kind"] in kinds]

    def news(self, *kinds: str) -> list[dict[str, Any]]:
        """Events that this command has added."""
        return [event for event in self.events()[self.events_before :] if event["kind"] in kinds]

    def until(self, ready: Callable[[], Any], limit_s: float = 400.0) -> None:
        """Wait, and remember every process that shows up meanwhile."""
        end = time.monotonic() + limit_s
        while not ready():
            assert self._driver.poll() is None, f"the command ended early: {self.output()}"
            assert time.monotonic() < end, f"nothing came in {limit_s} s: {self.output()}"
            self._look()
            time.sleep(0.2)
        self._look()

    def until_commits(self, count: int) -> None:
        self.until(lambda: len(self.news("commit")) >= count)

    def process(self, role: str) -> psutil.Process:
        self._look()
        (found,) = [p for p in self._seen.values() if p.is_running() and " ".join(p.cmdline()).startswith(ROLES[role])]
        return found

    def wait(self, limit_s: float = 400.0) -> int:
        """The exit code."""
        end = time.monotonic() + limit_s
        while (code := self._driver.poll()) is None:
            assert time.monotonic() < end, f"still running after {limit_s} s: {self.output()}"
            self._look()
            time.sleep(0.2)
        return code

    def survivors(self, limit_s: float, *, but: tuple[str, ...] = ()) -> list[str]:
        """Processes of the command that still run after ``limit_s``, but those whose command line starts with ``but``."""
        end = time.monotonic() + limit_s
        while True:
            left = [
                line for process in self._seen.values() if (line := _alive(process)) and not line.startswith(but or ("\0",))
            ]
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.2)

    def staged(self) -> list[Path]:
        """What the run has left in shared memory."""
        return list(Path("/dev/shm").glob(f"slipstream-*-{self.pid}"))

    def output(self) -> str:
        self._output.flush()
        self._output.seek(0)
        return self._output.read()

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "summary.json").read_text()))

    def kill_all(self) -> None:
        """For a test that failed: whatever of ours is left."""
        for process in [self._driver, *self._seen.values()]:
            if isinstance(process, subprocess.Popen) or process.is_running():
                process.kill()
        self._driver.wait()
        self._output.close()

    def _look(self) -> None:
        try:
            for process in psutil.Process(self.pid).children(recursive=True):
                self._seen.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            pass


def _alive(process: psutil.Process) -> str:
    """Its command line, or nothing once it is dead; a zombie is dead, and waits for its new parent only."""
    try:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:
        pass
    return ""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe and its reward functions; runs go to ``runs``."""
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "scores.py").write_text(SCORES)
    return folder


@pytest.fixture(scope="module")
def start(workshop: Path) -> Iterator[Callable[..., Command]]:
    """``start("name", "a.b=c", …)`` begins a run, ``start("name", "a.b=c", …, resume=True)`` goes on with it."""
    commands: list[Command] = []

    def begin(name: str, *overrides: str, resume: bool = False) -> Command:
        run = workshop / "runs" / name
        arguments = ["resume", str(run)] if resume else ["run", "recipe.yaml", f"name={name}"]
        commands.append(Command(workshop, run, [*arguments, *overrides]))
        return commands[-1]

    yield begin
    for command in commands:
        command.kill_all()
