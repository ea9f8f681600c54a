"""From the recipe's ``rollout.environment`` to the other side of every episode, with a wall clock on its answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Iterator
from numbers import Real
from pathlib import Path
from typing import Any

from slipstream.core import schema
from slipstream.core.built_in import environment_options
from slipstream.core.mistakes import UserError
from slipstream.core.records import Task
from slipstream.rollout.calculator import Calculator
from slipstream.rollout.environment import Completion, Environment, NoAnswer, Observation, SingleTurn, ToolError
from slipstream.rollout.failures import EnvironmentFailed
from slipstream.rollout.guess_number import GuessNumber
from slipstream.rollout.user_code import load

MOST_HUNG = 32
"""Calls that may hang on their threads, which nobody can end, before every further one fails its group."""

_BUILT_IN: dict[str, type[Environment]] = {"single_turn": SingleTurn, "calculator": Calculator, "guess_number": GuessNumber}


class Environments:
    """Opens one environment per sample.  ``search_path`` is the recipe's directory: the user's may stand in a file there."""

    def __init__(self, settings: schema.Environment, search_path: Path | None = None) -> None:
        """Raises UserError for an environment that does not exist, cannot be imported, or does not take the options."""
        self._timeout_s = settings.timeout_s
        self._hung: list[threading.Thread] = []
        options = environment_options(settings)
        if settings.name in _BUILT_IN:
            self._class: Any = _BUILT_IN[settings.name]
            self._options: dict[str, Any] = options.model_dump()
        else:
            self._class, self._options = _of_the_user(settings, search_path), options

    def check(self, first: Task) -> None:
        """Raises UserError if the environment of one task cannot be made."""
        try:
            self.open(first)
        except EnvironmentFailed as failure:
            raise UserError(f"rollout.environment: not for task {first.id} of {first.source}: {failure}") from failure

    def open(self, task: Task) -> Environment:
        """The environment of one episode of ``task``.  Raises EnvironmentFailed if the user's cannot be made."""
        with _contained():
            made: Environment = self._class(task, **self._options)
        return made

    async def observe(self, environment: Environment, completion: Completion) -> Observation:
        """Its answer to a turn; a ToolError is an answer too.

        Raises NoAnswer after ``timeout_s``: a thread that hangs goes on with the environment, so the episode must not.  Raises
        EnvironmentFailed for all else, a CancelledError that nobody asked for included.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                if inspect.iscoroutinefunction(environment.observe):
                    with _contained(ToolError, asyncio.CancelledError):
                        answer = await environment.observe(completion)
                else:
                    answer = await self._on_a_thread(environment.observe, completion)
        except ToolError as error:
            return f"error: {error}"
        except TimeoutError:
            raise NoAnswer(f"no answer within {self._timeout_s:g} s") from None
        except asyncio.CancelledError as error:
            if (asking := asyncio.current_task()) is None or asking.cancelling():
                raise
            shared = "observe awaits what was cancelled elsewhere; shield what several environments share (asyncio.shield)"
            raise EnvironmentFailed("environment/raised", f"CancelledError: {shared}") from error
        if answer is None or isinstance(answer, str) or _are_ids(answer):
            return answer
        raise EnvironmentFailed("environment/wrong_result", f"got {answer!r}, expected text, a tuple of token ids, or None")

    async def _on_a_thread(self, function: Callable[[Completion], Any], completion: Completion) -> Any:
        """A thread per call: one that hangs holds up no other, and, as a daemon, not the end of the process."""
        self._hung = [thread for thread in self._hung if thread.is_alive()]
        if len(self._hung) >= MOST_HUNG:
            raise EnvironmentFailed("environment/hung", f"{MOST_HUNG} calls have not come back; give the tools timeouts")
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        done.set_running_or_notify_cancel()

        def call() -> None:
            try:
                with _contained(ToolError):
                    answer = function(completion)
            except (ToolError, EnvironmentFailed) as error:
                done.set_exception(error)
            else:
                done.set_result(answer)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self._hung.append(thread)
            raise


def score(environment: Environment) -> dict[str, float]:
    """The environment's own score as a reward part; nothing where it has none.  Raises EnvironmentFailed for no number."""
    with _contained():
        got: Any = environment.score
        if got is None:
            return {}
        if not isinstance(got, Real) or not math.isfinite(got):  # NumPy's numbers are Real, too
            raise EnvironmentFailed("environment/wrong_score", f"got {got!r}, expected a finite number or None")
        return {"environment": float(got)}


@contextlib.contextmanager
def _contained(*passed: type[BaseException]) -> Iterator[None]:
    """Around the user's code: whatever it raises but ``passed``, ``sys.exit`` included, fails the group with a traceback."""
    try:
        yield
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, (EnvironmentFailed, *passed)):
            raise
        traceback.print_exc()
        raise EnvironmentFailed("environment/raised", f"{type(error).__name__}: {error}") from error


def _are_ids(answer: Any) -> bool:
    return isinstance(answer, tuple) and all(type(token) is int and token >= 0 for token in answer)


def _of_the_user(settings: schema.Environment, search_path: Path | None) -> Any:
    """The class at ``module:Class``."""
    key, name = "rollout.environment", settings.name
    try:
        found = load(name, search_path, "Class")
    except ValueError as error:
        raise UserError(f"{key}.name: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise UserError(f"{key}.name: {name} is no subclass of slipstream.rollout.environment.Environment, as it has to be")
    try:
        inspect.signature(found).bind(None, **settings.options)
    except TypeError as error:
        raise UserError(f"{key}.options: {name} does not take them ({error})") from error
    return found
