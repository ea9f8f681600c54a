"""From the command line to a running controller and back: Ray, supervision from outside, and a clean end."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slipstream.cluster.actors import redirect_output
from slipstream.cluster.faults import cause, describe
from slipstream.cluster.progress import Display
from slipstream.cluster.staging import staging
from slipstream.core.environment import ENVIRONMENT
from slipstream.core.mistakes import UserError
from slipstream.core.rundir import RunDirectory
from slipstream.core.schema import Recipe

log = logging.getLogger("slipstream")
POLL_S = 0.5
LOCAL_STARTS = 3
STOP_TIMEOUT_S = 120.0


class RunFailed(RuntimeError):
    """The run ended with ``status: failed``; the message is the reason that its summary gives."""


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=16)
class ControllerActor:
    """The controller in a process of its own, so that its death is seen, and told, from outside."""

    def __init__(self, recipe: Recipe, run_path: str, resume: bool, search_path: str, run_id: str) -> None:
        self._recipe, self._run_path, self._resume, self._search_path = recipe, Path(run_path), resume, search_path
        self._run_id = run_id
        self._controller: Any = None
        redirect_output(self._run_path / "logs" / "controller.log")

    async def run(self) -> dict[str, Any]:
        from slipstream.cluster.controller import Controller
        from slipstream.cluster.recovery import prepare

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        run = RunDirectory.open(self._run_path, write=True)
        try:
            parts = prepare(self._recipe, run, self._run_id, resume=self._resume)
        except BaseException:
            run.close()
            raise
        self._controller = Controller(self._recipe, run, parts, self._search_path)
        try:
            return await self._controller.run()
        except BaseException as problem:  # in words: on its way through Ray an exception loses its notes
            if isinstance(cause(problem), UserError):
                raise
            raise RunFailed(describe(problem)) from problem

    async def snapshot(self) -> dict[str, Any] | None:
        return self._controller.snapshot() if self._controller is not None else None

    async def stop(self) -> None:
        if self._controller is not None:
            self._controller.stop()


def launch(recipe: Recipe, run_path: Path, *, resume: bool = False, search_path: Path, quiet: bool = False) -> dict[str, Any]:
    """Run to the end and return the summary.  Ctrl-C (or SIGTERM) stops after the step at hand, with a checkpoint.

    Raises KeyboardInterrupt if it had to be stopped at once, and RunFailed; ``summary.json`` then says why, also when the
    controller's process has died.  A new run that never began leaves no directory, so that its name stays free.
    """
    run_id = f"{recipe.name}-{os.getpid()}"
    try:
        with staging(run_id), Display(recipe, quiet=quiet) as display, ray_session(recipe):
            return _supervise((recipe, str(run_path), resume, str(search_path), run_id), run_path, display)
    finally:
        if not resume and not (run_path / "events.jsonl").exists():
            shutil.rmtree(run_path)


def _supervise(arguments: tuple[Any, ...], run_path: Path, display: Display) -> dict[str, Any]:
    """Start the controller, show how it gets on, and tell what became of it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ControllerActor
    options = actor_class.options(scheduling_strategy=here, runtime_env={"env_vars": ENVIRONMENT})
    controller = options.remote(*arguments)
    finished = controller.run.remote()
    snapshot: dict[str, Any] | None = None
    with stop_on_signal(controller) as stopping:
        while not ray.wait([finished], timeout=POLL_S)[0]:
            with contextlib.suppress(ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
                snapshot = ray.get(controller.snapshot.remote(), timeout=10.0) or snapshot
            display.update(snapshot)
    try:
        return ray.get(finished)
    except ray.exceptions.RayTaskError as failure:
        ended = as_told(failure)
        if not (run_path / "summary.json").exists():
            _write_ending(run_path, "failed", str(ended), snapshot)
        raise ended from failure
    except ray.exceptions.RayError as death:
        if stopping.killed:
            reason = f"{stopping.killed}; what came after the last checkpoint is lost"
            _write_ending(run_path, "interrupted", reason, snapshot)
            sys.stderr.write(f"{reason}\n")
            raise KeyboardInterrupt(reason) from death
        reason = describe(death)
        _write_ending(run_path, "failed", reason, snapshot)
        raise RunFailed(reason) from death


def as_told(failure: ray.exceptions.RayTaskError) -> UserError | RunFailed:
    """What the command says of an exception in the controller: a mistake of the user's, or a run that failed."""
    problem = cause(failure)
    if isinstance(problem, UserError):
        return UserError(describe(failure))
    if isinstance(problem, RunFailed):
        return RunFailed(str(problem))
    sys.stderr.write(f"{failure}\n")  # the run had not begun, so that no log has the traceback
    return RunFailed(describe(failure))


def _write_ending(run_path: Path, status: str, reason: str, snapshot: dict[str, Any] | None) -> None:
    """The end that the controller could not write any more, as far as the driver knows; nothing for a run that never began."""
    known = snapshot or {}
    summary = {
        "status": status,
        "error": reason,
        "version": known.get("step", 0),
        "wall_s": known.get("wall_s", 0.0),
        "ledger": None,  # the records know better than the last snapshot: `slipstream audit` counts them
    }
    if not (run_path / "events.jsonl").exists():
        return
    try:
        with RunDirectory.open(run_path, write=True) as run:
            run.append("events", {"time": time.time(), "kind": "end", "status": status, "error": reason})
            run.write_summary(summary)
    except OSError as problem:  # a full disk must not hide the reason
        sys.stderr.write(f"{run_path}: the summary could not be written: {problem}\n")


@contextlib.contextmanager
def ray_session(recipe: Recipe) -> Iterator[None]:
    """A connection to ``cluster.address`` (or $RAY_ADDRESS), or a Ray of our own on this machine, which ends with the block."""
    address = recipe.cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    os.environ.update(ENVIRONMENT)
    _require_answer(address)
    options: dict[str, Any] = {}
    if address == "local":
        wanted = recipe.rollout.engines * recipe.cluster.engine_cpus + recipe.trainer.ranks * recipe.cluster.learner_cpus
        options = {"num_cpus": max(os.cpu_count() or 1, int(wanted + 0.999)), "include_dashboard": False}
    _start_ray(address, **options)
    try:
        yield
    finally:
        ray.shutdown()


def _start_ray(address: str, **options: Any) -> None:
    """Ray gives its own node 30 s, which no setting changes; on a busy machine that may take another try."""
    attempts = LOCAL_STARTS if address == "local" else 1
    for attempt in range(1, attempts + 1):
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
            return
        except Exception as problem:  # Ray raises it bare
            ray.shutdown()
            if attempt == attempts:
                told = f"Ray did not start ({problem}); is this machine busy with something else? Try again"
                raise RunFailed(told) from problem
            log.warning("Ray did not start (%s); attempt %d of %d follows", problem, attempt + 1, attempts)


def _require_answer(address: str) -> None:
    """Raise UserError if nothing listens at ``host:port``: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # "local" or "auto"
        return
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except OSError as problem:
        raise UserError(
            f"cluster.address: nothing answers at {address} ({problem}); expected a running Ray cluster: start one there with "
            "`ray start --head`, or remove cluster.address (and RAY_ADDRESS) to run on this machine"
        ) from problem


@dataclass(slots=True)
class Stopping:
    """Whether somebody asked for the end, and why the controller had to be killed for it, if it had."""

    asked: bool = False
    killed: str = ""


@contextlib.contextmanager
def stop_on_signal(controller: Any) -> Iterator[Stopping]:
    """The first SIGINT or SIGTERM asks the controller to stop; the second, or two minutes, ends it at once."""
    stopping = Stopping()

    def kill(why: str) -> None:
        stopping.killed = why
        ray.kill(controller)

    def handler(signum: int, frame: FrameType | None) -> None:
        if stopping.asked:
            kill("stopped at once, by a second signal")
            return
        stopping.asked = True
        sys.stderr.write("\nstopping after the step at hand (again to stop at once) ...\n")
        controller.stop.remote()
        signal.signal(signal.SIGALRM, lambda *_: kill(f"the step at hand did not end within {STOP_TIMEOUT_S:.0f} s"))
        signal.alarm(int(STOP_TIMEOUT_S))

    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        signal.alarm(0)
        for signum, old in before.items():
            signal.signal(signum, old)
