"""The schema, which cannot import torch, names what the dictionaries hold."""

from typing import get_args

import pytest

from slipstream.algos.advantages import ADVANTAGES
from slipstream.algos.corrections import REJECTIONS, Level
from slipstream.algos.losses import LOSSES
from slipstream.core import rules
from slipstream.core.algorithms import OF_GROUPS, PRESETS, Algo, Correction
from slipstream.core.schema import Recipe


def test_every_name_of_the_schema_is_there_and_the_other_way_round():
    fields = Algo.model_fields
    assert set(get_args(fields["name"].annotation)) == set(PRESETS)
    assert set(get_args(fields["loss"].annotation)) == set(LOSSES)
    assert set(get_args(fields["advantage"].annotation)) == set(ADVANTAGES)
    assert set(get_args(Correction.model_fields["weight"].annotation)) == set(get_args(Level))
    (rejection,) = get_args(Correction.model_fields["reject"].annotation)
    assert set(get_args(rejection)) == set(REJECTIONS)


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_group_of_one_is_refused_where_siblings_are_compared(advantage):
    sections = {"name": "x", "model": {"path": "builtin:tiny"}, "data": {"source": "builtin:number_sorting"}}
    algo = {"advantage": advantage, "critic": {} if advantage == "gae" else None}
    sections |= {"algo": algo, "distill": {"teacher": "builtin:tiny"}, "schedule": {"group_size": 1}}
    recipe = Recipe.model_validate(sections)
    assert [key for key, _ in rules.problems(recipe)] == (["schedule.group_size"] if advantage in OF_GROUPS else [])
