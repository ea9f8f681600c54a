"""What the learner is given of a demonstration of several turns: a sequence per turn, with loss on what the policy writes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from slipstream.cluster.cursor import Cursor
from slipstream.cluster.supervised import Imitation
from slipstream.core.metrics import Metrics
from slipstream.core.records import TrainBatch, WeightVersion
from slipstream.core.schema import Data, Recipe
from slipstream.rollout.prompts import PromptEncoder
from slipstream.rollout.tasks import open_source
from slipstream.trainer.model import tiny_tokenizer


class Kept:
    """Keeps the batches that it is to train on."""

    def __init__(self) -> None:
        self.batches: list[TrainBatch] = []

    async def train(self, batch: TrainBatch) -> Metrics:
        self.batches.append(batch)
        return {}


def test_every_turn_is_a_sequence_whose_prompt_is_all_before_it() -> None:
    """Games of clean halving on 1 to 7; ids: digit d is 4 + d, ``<`` 47, ``>`` 48, EOS 2, and ``1-7?`` with BOS is five ids."""
    data = Data(source="builtin:guess_number", options={"size": 40, "demonstrations": "clean"}, epochs=1)
    recipe = Recipe.model_validate({"name": "t", "model": {"path": "builtin:tiny"}, "data": data.model_dump()})
    encoder, kept = PromptEncoder(tiny_tokenizer()), Kept()
    learners: Any = kept
    imitation = Imitation(recipe, Cursor(open_source(data, 0, "train"), encoder, 1), encoder, learners)
    assert asyncio.run(imitation.step(40, WeightVersion(0, 0))) == (40, {})
    assert asyncio.run(imitation.step(40, WeightVersion(0, 0))) is None
    (batch,) = kept.batches
    (samples,) = batch.minibatches
    first, second, third = ([s for s in samples if s.sample_id.endswith(f"/turn{turn}")] for turn in range(3))
    assert len(first) == 40 > len(second) > len(third) > 0
    prompt = (1, 5, 41, 11, 57)
    assert all(s.input_ids == (*prompt, 8, 2) for s in first)  # halving begins with 4
    assert {s.input_ids for s in second} == {(*prompt, 8, 2, 47, 6, 2), (*prompt, 8, 2, 48, 10, 2)}  # and goes on with 2 or 6
    for sample in samples:
        assert sample.ce == (1.0, 1.0) and sample.prompt_length == len(sample.input_ids) - 2  # a digit and the EOS
    assert batch.ce_denominators == (2.0 * len(samples),)


def test_demonstrations_that_never_fit_end_the_run_instead_of_holding_it_up() -> None:
    """Without a limit of epochs: the prompts of five ids fit into six, no turn of two ids fits behind them."""
    data = Data(source="builtin:guess_number", options={"size": 40, "demonstrations": "clean"})
    recipe = Recipe.model_validate({"name": "t", "model": {"path": "builtin:tiny"}, "data": data.model_dump()})
    encoder = PromptEncoder(tiny_tokenizer(), max_length=6)
    cursor, learners = Cursor(open_source(data, 0, "train"), encoder, None), cast(Any, Kept())
    with pytest.raises(ValueError, match="not one of 40 demonstrations fits"):
        asyncio.run(Imitation(recipe, cursor, encoder, learners).step(4, WeightVersion(0, 0)))
    assert cursor.skipped == 40
