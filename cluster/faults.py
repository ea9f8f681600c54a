"""What went wrong, in words: Ray and task groups wrap the cause of a failure several times."""

from __future__ import annotations

import re

import ray

from slipstream.core.mistakes import UserError

_DEAD = {
    "RolloutActor": ("an engine's", "logs/engine-*.log"),
    "LearnerActor": ("the learner's", "logs/learner-*.log"),
    "ControllerActor": ("the controller's", "logs/controller.log"),
}


def cause(problem: BaseException) -> BaseException:
    """The innermost exception that says what happened."""
    return _layers(problem)[-1]


def _layers(problem: BaseException) -> list[BaseException]:
    layers = [problem]
    while True:
        if isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        elif isinstance(problem, ray.exceptions.RayTaskError) and isinstance(problem.cause, BaseException):
            problem = problem.cause
        else:
            return layers
        layers.append(problem)


def _notes(problem: BaseException) -> list[str]:
    return [note for layer in _layers(problem) for note in getattr(layer, "__notes__", ())]


def describe(problem: BaseException) -> str:
    """One failure in one line, with what a user can do where we know it."""
    notes = "".join(f" ({note})" for note in _notes(problem))
    return _say(cause(problem)) + notes


def _say(found: BaseException) -> str:
    if isinstance(found, ray.exceptions.RayActorError):
        return _obituary(" ".join(str(found).split()))
    return str(found) if isinstance(found, UserError) else f"{type(found).__name__}: {found}"


def _obituary(told: str) -> str:
    """Ray tells of a dead actor in a long text; the class, the process and the kind of exit are what we need of it."""
    found = {key: re.search(pattern, told) for key, pattern in (("class", r"class_name: (\w+)"), ("pid", r"pid: (\d+)"))}
    name = found["class"][1] if found["class"] else ""
    whose, logs = _DEAD.get(name, ("a", "logs/"))
    pid = f" {found['pid'][1]}" if found["pid"] else ""
    detail = re.search(r"Worker exit detail: (.+?)(?: Some common causes|$)", told)
    said = detail[1] if detail else told
    return f"{whose} process{pid} died ({name or 'unknown'}); killed, or out of memory? See {logs}. Ray says: {said}"
