"""Graders that need a process: killed when they run too long, so one bad answer never stops the rollouts.

Each worker is ``python -m slipstream.rollout.grader_worker``: requests go in by its stdin, scores come back as JSON by its
stdout, a function at a time.  Only the parent's own data is pickled, and only towards the worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.mistakes import UserError
from slipstream.rollout.failures import GradingError

START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Grader:
    """A function of ``grader_worker`` (``math``) or of the user (``my_rewards:brevity``), and its fixed keyword arguments."""

    function: str
    options: Mapping[str, Any]


class GraderPool:
    """``workers`` processes that know ``graders``; started when first needed, replaced after a timeout or a crash."""

    def __init__(self, graders: Sequence[Grader], *, workers: int, timeout_s: float, search_path: Path | None = None) -> None:
        """``timeout_s`` is the wall clock of one call; user functions are importable from ``search_path`` too."""
        self._graders = tuple(graders)
        self._timeout_s = timeout_s
        self._search_path = search_path
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grader")
        self._free: asyncio.Queue[_Worker | None] = asyncio.Queue()
        for _ in range(workers):
            self._free.put_nowait(None)
        self._running: set[_Worker] = set()

    async def start(self) -> None:
        """Start one worker now.  Raises UserError if a function cannot be imported: that is the recipe's mistake."""
        worker = await self._free.get()
        try:
            worker = worker or await self._spawn()
        finally:
            self._free.put_nowait(worker)

    async def grade(self, function: str, arguments: Mapping[str, Any]) -> list[float | None]:
        """The function's scores.  Raises GradingError on a raise, a timeout, a crash, or a result that is no list of numbers.

        The clock runs once a worker is free.
        """
        worker = await self._free.get()
        healthy: _Worker | None = None
        try:
            worker = worker or await self._spawn()
            reply = await self._ask(worker, {"function": function, "arguments": dict(arguments)}, function)
            healthy = worker
        finally:
            if healthy is None and worker is not None:
                self._end(worker)
            self._free.put_nowait(healthy)
        if "error" in reply:
            raise GradingError(f"{function}/{reply['error']}", reply["detail"])
        return list(reply["scores"])

    def close(self) -> None:
        """Kill the workers."""
        for worker in list(self._running):
            self._end(worker)
        self._threads.shutdown(wait=False)

    async def _ask(self, worker: _Worker, request: Any, function: str) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._threads, worker.call, request)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError:
            raise GradingError(f"{function}/timeout", f"no score after {self._timeout_s:g} s; the grader was killed") from None
        except (EOFError, OSError) as error:
            raise GradingError(
                f"{function}/crashed", f"the grader's process ended ({error!r}); its error is in the log"
            ) from error

    async def _spawn(self) -> _Worker:
        worker = _Worker()
        self._running.add(worker)
        setup = {
            "graders": [(grader.function, dict(grader.options)) for grader in self._graders],
            "search_path": str(self._search_path.resolve()) if self._search_path else None,
        }
        started = False
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await loop.run_in_executor(self._threads, worker.call, setup)
            started = "error" not in reply
        except TimeoutError:
            raise GradingError("grader/timeout", f"a grader process did not start within {START_TIMEOUT_S:g} s") from None
        except (EOFError, OSError) as error:
            raise GradingError("grader/crashed", f"a grader process ended while it started ({error!r}); see the log") from error
        finally:
            if not started:
                self._end(worker)
        if not started:
            raise UserError(f"reward.parts: {reply['detail']}")
        return worker

    def _end(self, worker: _Worker) -> None:
        self._running.discard(worker)
        worker.kill()


class _Worker:
    """One process, and what the user's graders start in it; ``call`` raises EOFError once it is dead or killed.

    It leads a session, so that all of it can be killed.  A worker whose parent has gone ends by itself.
    """

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-P", "-m", "slipstream.rollout.grader_worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )

    def call(self, request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        data = pickle.dumps(request)
        self._process.stdin.write(struct.pack("<Q", len(data)) + data)
        self._process.stdin.flush()
        header = self._process.stdout.read(8)
        body = self._process.stdout.read(struct.unpack("<Q", header)[0]) if len(header) == 8 else b""
        if not body:
            raise EOFError("no answer")
        reply: dict[str, Any] = json.loads(body)
        return reply

    def kill(self) -> None:
        if self._process.returncode is None:  # not reaped yet: the number is still the group's
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
