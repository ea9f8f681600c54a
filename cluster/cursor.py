"""The place in the data: which task comes next, as two numbers that a checkpoint can hold."""

from __future__ import annotations

from slipstream.cluster.evaluation import Encoded
from slipstream.core.mistakes import UserError
from slipstream.core.records import Task
from slipstream.rollout.prompts import PromptEncoder, PromptTooLong
from slipstream.rollout.tasks import TaskSource


class Cursor:
    """Walks a source by (epoch, position), encodes prompts, and leaves out (and counts) those that are too long."""

    def __init__(self, source: TaskSource, encoder: PromptEncoder, epochs: int | None) -> None:
        self._source = source
        self._encoder = encoder
        self._epochs = epochs
        self.epoch = 0
        self.position = 0
        self.skipped = 0

    def next(self) -> Encoded | None:
        """The next task and its prompt ids, or None when all epochs are over.

        Raises UserError if not one prompt of a whole epoch fits.
        """
        for _ in range(len(self._source) + 1):
            if self.position == len(self._source):
                self.epoch, self.position = self.epoch + 1, 0
            if self._epochs is not None and self.epoch >= self._epochs:
                return None
            self.position += 1
            try:
                return self.at(self.epoch, self.position - 1)
            except PromptTooLong:
                self.skip()
        raise UserError(
            f"data: not one of {len(self._source)} prompts fits; raise data.max_prompt_tokens or model.max_length, "
            "or lower rollout.sampling.max_tokens"
        )

    @property
    def size(self) -> int:
        """Tasks of one epoch."""
        return len(self._source)

    def skip(self) -> None:
        """Count a task that ``next`` gave, or would have given, as too long."""
        self.skipped += 1

    def first(self) -> Task:
        """The first task, whatever its length: what the reward functions are checked against."""
        return self.task(0, 0)

    def task(self, epoch: int, position: int) -> Task:
        return self._source.task(epoch, position)

    def at(self, epoch: int, position: int) -> Encoded:
        """A given task again, for a retry.  Raises PromptTooLong."""
        task = self.task(epoch, position)
        return task, self._encoder.encode(task)

    def all(self) -> list[Encoded]:
        """Every task of one pass that fits, for evaluation."""
        found = []
        for position in range(len(self._source)):
            try:
                found.append(self.at(0, position))
            except PromptTooLong:
                self.skip()
        return found
