"""The tasks of a recipe as prompt ids, and the place among them as two numbers that a checkpoint can hold."""

from __future__ import annotations

from pathlib import Path

from slipstream.cluster.evaluation import Encoded
from slipstream.core.mistakes import UserError
from slipstream.core.records import Task
from slipstream.core.schema import Recipe
from slipstream.rollout.prompts import PromptEncoder, PromptTooLong
from slipstream.rollout.tasks import TaskSource, open_source
from slipstream.trainer.model import context_limit, load_tokenizer


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


def held_out_tasks(recipe: Recipe, model_path: Path) -> list[Encoded]:
    """The evaluation's tasks that fit, as prompt ids; none where ``monitor.eval.size`` is 0."""
    if not recipe.monitor.eval.size:
        return []
    source = open_source(recipe.data, recipe.seed, "eval", recipe.monitor.eval)
    return Cursor(source, prompt_encoder(recipe, model_path), 1).all()


def prompt_encoder(recipe: Recipe, model_path: Path) -> PromptEncoder:
    """Prompts as a run sees them; those that leave no room for a response do not fit."""
    limit = context_limit(recipe.model, model_path)
    return PromptEncoder(
        load_tokenizer(model_path),
        chat=recipe.data.chat,
        system_prompt=recipe.data.system_prompt,
        max_prompt_tokens=_prompt_limit(recipe, limit),
        max_length=limit,
    )


def _prompt_limit(recipe: Recipe, context: int) -> int:
    """Prompt tokens that leave room for a response of ``max_tokens``, and no more than the recipe allows."""
    room = context - (recipe.rollout.sampling.max_tokens if recipe.algo.name != "sft" else 0)
    return min(room, recipe.data.max_prompt_tokens or room)
