"""Supervised steps on the source's demonstrations: the warm start before reinforcement, and ``algo.name: sft``."""

from __future__ import annotations

from collections.abc import AsyncIterator

from slipstream.cluster.assembly import assemble_demonstrations
from slipstream.cluster.cursor import Cursor
from slipstream.cluster.learners import LearnerGroup
from slipstream.core.metrics import Metrics
from slipstream.core.mistakes import UserError
from slipstream.core.records import WeightVersion
from slipstream.core.schema import Recipe, WarmStart
from slipstream.rollout.prompts import PromptEncoder, PromptTooLong


class Imitation:
    """Feeds the learner demonstrations, in the order of the data, as batches of pure cross-entropy."""

    def __init__(self, recipe: Recipe, cursor: Cursor, encoder: PromptEncoder, learners: LearnerGroup) -> None:
        self._algo = recipe.algo
        self._cursor = cursor
        self._encoder = encoder
        self._learners = learners
        self.steps = 0

    async def step(self, count: int, version: WeightVersion) -> tuple[int, Metrics] | None:
        """Train once on the next ``count`` demonstrations; (how many there were, metrics), or None at the end of the data.

        Every turn of a demonstration is a sequence of its own, whose prompt is all that came before: no loss falls on
        observations.  Raises UserError if a task has no demonstration.
        """
        turns: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        found = misses = 0
        while found < count and (entry := self._cursor.next()) is not None:
            try:
                turns += [(f"{entry[0].id}/turn{i}", *turn) for i, turn in enumerate(self._encoder.demonstration(entry[0]))]
                found += 1
                misses = 0
            except PromptTooLong:
                self._cursor.skip()
                misses += 1
                if misses >= self._cursor.size:
                    raise UserError(
                        f"data: not one of {self._cursor.size} demonstrations fits behind its prompt; raise model.max_length"
                    ) from None
        if not found:
            return None
        metrics = await self._learners.train(assemble_demonstrations(turns, version, self._algo.minibatches))
        self.steps += 1
        return found, metrics

    async def warm_start(self, warm: WarmStart, version: WeightVersion) -> AsyncIterator[tuple[int, float]]:
        """Yields (step, loss) after every step.  The version stays: what comes out is what the engines start from."""
        await self._learners.begin_phase(warm.optimizer, warm.steps * self._algo.minibatches, epochs=1)
        for step in range(1, warm.steps + 1):
            trained = await self.step(warm.batch_size, version)
            if trained is None:
                raise UserError(
                    f"warm_start: the data ended after {step - 1} of {warm.steps} steps of {warm.batch_size}; "
                    "lower warm_start.steps or raise data.epochs"
                )
            yield step, float(trained[1]["loss/ce"].value())  # type: ignore[arg-type]
