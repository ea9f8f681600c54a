"""Why one group cannot be used, while the run goes on."""

from __future__ import annotations

from typing import Any


class GroupFailed(RuntimeError):
    """A group that could not be sampled or graded, with a ``reason`` to count it by (``"math/timeout"``) and its ``detail``.

    It never becomes a group with a reward of 0.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.detail)


class GradingError(GroupFailed):
    """A reward function raised, hung, died, or did not return a number for each sibling."""


class EnvironmentFailed(GroupFailed):
    """An environment raised, or returned what is neither an observation nor the end; ``ToolError`` is no failure."""
