"""From the recipe's ``rollout.environment`` to the other side of every episode, with a wall clock on its answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import difflib
import importlib
import inspect
import math
import re
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.core import schema
from slipstream.core.recipe_problems import options_of
from slipstream.core.records import Task
from slipstream.rollout.calculator import Calculator, CalculatorOptions
from slipstream.rollout.environment import Completion, Environment, Observation, SingleTurn, ToolError
from slipstream.rollout.failures import EnvironmentFailed
from slipstream.rollout.guess_number import GuessNumber

MOST_HUNG = 32
"""Calls that may hang on their threads, which nobody can end, before every further one fails its group."""

_BUILT_IN: dict[str, tuple[type[Environment], type[schema.Section]]] = {
    "single_turn": (SingleTurn, schema.Section),
    "calculator": (Calculator, CalculatorOptions),
    "guess_number": (GuessNumber, schema.Section),
}
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Environments:
    """Opens one environment per sample.  ``search_path`` is the recipe's directory: the user's may stand in a file there."""

    def __init__(self, settings: schema.Environment, search_path: Path | None = None) -> None:
        """Raises ValueError for an environment that does not exist, cannot be imported, or does not take the options."""
        self._timeout_s = settings.timeout_s
        self._hung: list[threading.Thread] = []
        if settings.name in _BUILT_IN:
            self._class, options = _BUILT_IN[settings.name]
            self._options = options_of(options, settings.options, "rollout.environment.options").model_dump()
        else:
            self._class, self._options = _of_the_user(settings, search_path), settings.options

    def check(self, first: Task) -> None:
        """Raises ValueError if the environment of one task cannot be made."""
        try:
            self.open(first)
        except EnvironmentFailed as failure:
            raise ValueError(f"rollout.environment: not for task {first.id} of {first.source}: {failure}") from failure

    def open(self, task: Task) -> Environment:
        """The environment of one episode of ``task``.  Raises EnvironmentFailed if the user's cannot be made."""
        try:
            return self._class(task, **self._options)
        except Exception as error:
            raise _failure(error) from error

    async def observe(self, environment: Environment, completion: Completion) -> Observation:
        """Its answer to a turn; a ToolError, or none in time, is an answer too.  Raises EnvironmentFailed for all else."""
        try:
            async with asyncio.timeout(self._timeout_s) as clock:
                if inspect.iscoroutinefunction(environment.observe):
                    answer = await environment.observe(completion)
                else:
                    answer = await self._on_a_thread(environment.observe, completion)
        except ToolError as error:
            return f"error: {error}"
        except EnvironmentFailed:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and clock.expired():
                return f"error: no answer within {self._timeout_s:g} s"
            raise _failure(error) from error
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
                done.set_result(function(completion))
            except StopIteration as error:  # which no future can hold
                done.set_exception(RuntimeError(f"StopIteration: {error}"))
            except BaseException as error:  # noqa: BLE001 - it is raised again where the answer is awaited
                done.set_exception(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self._hung.append(thread)
            raise


def score(environment: Environment) -> dict[str, float]:
    """The environment's own score as a reward part; nothing where it has none.  Raises EnvironmentFailed for no number."""
    got = environment.score
    if got is None:
        return {}
    if not isinstance(got, int | float) or not math.isfinite(got):
        raise EnvironmentFailed("environment/wrong_score", f"got {got!r}, expected a finite number or None")
    return {"environment": float(got)}


def _failure(error: Exception) -> EnvironmentFailed:
    traceback.print_exc()
    return EnvironmentFailed("environment/raised", f"{type(error).__name__}: {error}")


def _are_ids(answer: Any) -> bool:
    return isinstance(answer, tuple) and all(type(token) is int and token >= 0 for token in answer)


def _of_the_user(settings: schema.Environment, search_path: Path | None) -> Any:
    """The class at ``module:Class``."""
    key, name = "rollout.environment", settings.name
    if not _DOTTED.fullmatch(name):
        near = difflib.get_close_matches(name, _BUILT_IN, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{key}.name: got {name!r}, expected {', '.join(_BUILT_IN)} or module:Class{meant}")
    if search_path is not None and str(search_path.resolve()) not in sys.path:
        sys.path.append(str(search_path.resolve()))  # last: a random.py beside a recipe must not shadow the standard library
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{key}.name: {name} cannot be imported ({error}); expected module:Class beside the recipe or installed"
        ) from error
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise ValueError(f"{key}.name: {name} is no subclass of slipstream.rollout.environment.Environment, as it has to be")
    try:
        inspect.signature(found).bind(None, **settings.options)
    except TypeError as error:
        raise ValueError(f"{key}.options: {name} does not take them ({error})") from error
    return found
