"""Packing loses nothing, mixes nothing, and the plan over ranks is balanced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.records import Steps, TrainSample
from slipstream.trainer.packing import pack, partition


def sample(prompt: list[int], response: list[int], name: str = "s", rl: float = 1.0) -> TrainSample:
    length = len(response)
    return TrainSample(
        sample_id=name,
        input_ids=(*prompt, *response),
        prompt_length=len(prompt),
        rl=(rl,) * length,
        ce=(0.0,) * length,
        distill=tuple(float(token) for token in response),
        advantages=tuple(float(i) for i in range(length)),
        behaviour_logprobs=tuple(-float(token) for token in response),
        lag=(0,) * length,
    )


def test_a_row_by_hand() -> None:
    """The docstring's example: [1 9 | 4 2] and [1 | 7]; position 1 predicts token 4, 2 predicts 2, and 4 predicts 7."""
    row = pack([sample([1, 9], [4, 2]), sample([1], [7], rl=0.5)])
    assert row.input_ids_T.tolist() == [1, 9, 4, 2, 1, 7]
    assert row.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1]
    assert row.predicting_N.tolist() == [1, 2, 4]
    assert row.targets_N.tolist() == [4, 2, 7]
    assert row.rl_N.tolist() == [1.0, 1.0, 0.5]
    assert row.distill_N.tolist() == [4.0, 2.0, 7.0]
    assert row.advantages_N.tolist() == [0.0, 1.0, 0.0]
    assert row.behaviour_N.tolist() == [-4.0, -2.0, -7.0]
    assert row.unpack(torch.tensor([0.5, 1.5, 2.5])) == [[0.5, 1.5], [2.5]]
    assert row.rewards_N.tolist() == [0.0] * 3 and row.action_N.tolist() == [False] * 3, "no critic, no steps"


def test_steps_stand_beside_their_tokens() -> None:
    with_steps = replace(sample([1, 9], [4, 2]), steps=Steps(rewards=(-0.5, 1.0), actions=(False, True)))
    row = pack([with_steps, sample([1], [7])])
    assert row.rewards_N.tolist() == [-0.5, 1.0, 0.0] and row.action_N.tolist() == [False, True, False]
    with pytest.raises(ValueError, match=r"sample s: steps\.rewards has 1 entries, expected 2"):
        replace(with_steps, steps=Steps(rewards=(1.0,), actions=(True, True)))


def test_the_eos_label_stays_although_it_is_the_padding_token() -> None:
    """SmolLM2 has pad = eos = 2.  Both of the response's 2s are targets with their weight, the one in the prompt is not."""
    row = pack([sample([1, 2, 5], [6, 2, 2])])
    assert row.targets_N.tolist() == [6, 2, 2]
    assert row.rl_N.tolist() == [1.0, 1.0, 1.0]
    assert row.input_ids_T[row.predicting_N + 1].tolist() == row.targets_N.tolist()


def test_an_empty_row_has_no_weight() -> None:
    row = pack([])
    assert (row.rl_N.abs().sum() + row.ce_N.abs().sum()).item() == 0.0
    assert row.unpack(torch.zeros(1)) == []
    assert row.predicting_N.max() < len(row.input_ids_T)


@pytest.mark.parametrize(("prompt", "response"), [([], [4]), ([1, 2], [])])
def test_samples_without_prompt_or_response_are_refused(prompt: list[int], response: list[int]) -> None:
    with pytest.raises(ValueError, match=r"sample odd: got \d prompt tokens of \d, expected at least one prompt token"):
        pack([sample(prompt, response, name="odd")])


def test_packed_logits_are_those_of_each_sequence_alone(tiny: Path) -> None:
    """Attention must not cross samples.  Alone and packed differ by float32 rounding only; a leak changes logits by 1e-1.

    The shortest sequences (one prompt token, one response token) stand in the middle, where a boundary is easiest to miss.
    """
    from slipstream.core import schema
    from slipstream.trainer.model import load_policy, packed_logits

    torch.manual_seed(0)
    model = load_policy(tiny, schema.Model(path=str(tiny)))
    shapes = [(5, 9), (1, 1), (1, 1), (12, 3), (2, 20)]
    samples = [sample(torch.randint(4, 64, (p,)).tolist(), torch.randint(4, 64, (n,)).tolist()) for p, n in shapes]
    row = pack(samples)
    with torch.no_grad():
        packed_NV = packed_logits(model, row.input_ids_T, row.position_ids_T, row.predicting_N)
        alone = [model(input_ids=torch.tensor([s.input_ids])).logits[0, s.prompt_length - 1 : -1] for s in samples]
    torch.testing.assert_close(packed_NV, torch.cat(alone), atol=1e-5, rtol=0)


def test_partition_by_hand() -> None:
    """Lengths 6, 5, 4, 3, 2 on two ranks with rows of 10: 20 tokens fit into 2 rows, longest first into the emptier one:
    6 | 5, then 4 joins 5 (9), 3 joins 6 (9), and 2 fits neither 9.  So 4 rows: 6 | 5 | 4 | 3+2; sorted by load 6, 5, 5, 4
    (the row of sample 1 before that of samples 3 and 4); rank 0 takes the first and the last."""
    samples = [sample([1], [4] * (n - 1)) for n in (6, 5, 4, 3, 2)]
    assert partition(samples, ranks=2, max_tokens=10) == [[[0], [2]], [[1], [3, 4]]]


def test_a_rank_without_work_gets_empty_rows() -> None:
    assert partition([sample([1], [4])], ranks=3, max_tokens=8) == [[[0]], [[]], [[]]]
    assert partition([], ranks=2, max_tokens=8) == [[[]], [[]]]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), max_size=60),
    ranks=st.integers(1, 5),
    max_tokens=st.sampled_from([2, 7, 24, 64, 4096]),
)
def test_partition_properties(lengths: list[int], ranks: int, max_tokens: int) -> None:
    samples = [sample([1], [4] * (n - 1), name=str(i)) for i, n in enumerate(lengths)]
    plan = partition(samples, ranks, max_tokens)
    assert plan == partition(samples, ranks, max_tokens)
    assert sorted(i for rank in plan for row in rank for i in row) == list(range(len(lengths)))
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    for row in (row for rank in plan for row in rank):
        assert len(row) <= 1 or sum(lengths[i] for i in row) <= max_tokens
    loads = [sum(lengths[i] for row in rank for i in row) for rank in plan]
    # Dealing sorted rows back and forth leaves the ranks at most one largest row apart.
    assert max(loads) - min(loads) <= max((sum(lengths[i] for i in row) for rank in plan for row in rank), default=0)
    # With every bin filled to half at worst (two emptiest rows together exceed a row), there are at most twice as many
    # rows as the tokens need, one round of ranks and the rows of over-long samples aside.
    needed = sum(min(n, max_tokens) for n in lengths) / max_tokens
    assert len(plan[0]) <= 2 * needed / ranks + 2
