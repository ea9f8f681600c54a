"""What went wrong, in words: Ray and task groups wrap the cause of a failure several times."""

from __future__ import annotations

import ray


def cause(problem: BaseException) -> BaseException:
    """The innermost exception that says what happened."""
    while True:
        if isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        elif isinstance(problem, ray.exceptions.RayTaskError) and isinstance(problem.cause, BaseException):
            problem = problem.cause
        else:
            return problem


def describe(problem: BaseException) -> str:
    """One failure in one line, with what a user can do where we know it."""
    found = cause(problem)
    if isinstance(found, ray.exceptions.RayActorError):
        name = found.actor_id and getattr(found, "_actor_class_name", None)
        return f"a process of the run died{f' ({name})' if name else ''}: {' '.join(str(found).split())}"
    return f"{type(found).__name__}: {found}"
