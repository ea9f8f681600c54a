"""From samples to packed rows: the only place where lists become tensors.

``T`` tokens of a row, ``N`` response tokens of a row (those that the row's samples predict).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.core.records import Steps, TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Samples laid end to end, with ``position_ids_T`` restarting at each, so attention stays inside a sample.

    Only the ``N`` positions of ``predicting_N`` get logits: position t predicts token t + 1, and the first of them for a
    sample is its last prompt token.  The other ``_N`` tensors stand in the same order, sample after sample;
    ``sequence_N`` numbers the samples, and ``lengths`` are their shares of N.  ``rewards_N`` and ``action_N`` are the samples'
    ``steps``; 0 and False where a sample has none.

    Example: samples (prompt ``[1, 9]``, response ``[4, 2]``) and (``[1]``, ``[7]``) give ``input_ids_T = [1 9 4 2 1 7]``,
    ``position_ids_T = [0 1 2 3 0 1]``, ``predicting_N = [1 2 4]``, ``targets_N = [4 2 7]``, ``sequence_N = [0 0 1]``,
    ``lengths = (2, 1)``.
    """

    input_ids_T: Int[Tensor, " T"]
    position_ids_T: Int[Tensor, " T"]
    predicting_N: Int[Tensor, " N"]
    targets_N: Int[Tensor, " N"]
    rl_N: Float[Tensor, " N"]
    ce_N: Float[Tensor, " N"]
    distill_N: Float[Tensor, " N"]
    advantages_N: Float[Tensor, " N"]
    behaviour_N: Float[Tensor, " N"]
    lag_N: Float[Tensor, " N"]
    rewards_N: Float[Tensor, " N"]
    action_N: Bool[Tensor, " N"]
    sequence_N: Int[Tensor, " N"]
    lengths: tuple[int, ...]

    def to(self, device: torch.device) -> PackedRow:
        moved: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return PackedRow(**{k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in moved.items()})

    def unpack(self, values_N: Float[Tensor, " N"]) -> list[list[float]]:
        """Values per response token as one list per sample; of an empty row, no list."""
        return [part.tolist() for part in values_N.split(list(self.lengths))] if self.lengths else []


def pack(samples: Sequence[TrainSample]) -> PackedRow:
    """One row of these samples; of no samples, a row of two tokens without weight, so that a rank short of work keeps step.

    Every response token keeps its place, whatever its id: an EOS that is also the padding token is trained on like any other.
    Raises ValueError for a sample without a prompt (nothing would predict its first token) or without a response.
    """
    for sample in samples:
        if not 1 <= sample.prompt_length < len(sample.input_ids):
            raise ValueError(
                f"sample {sample.sample_id}: got {sample.prompt_length} prompt tokens of {len(sample.input_ids)}, expected at "
                "least one prompt token and one response token"
            )
    input_ids: list[int] = []
    position_ids: list[int] = []
    predicting: list[int] = []
    targets: list[int] = []
    sequences: list[int] = []
    for number, sample in enumerate(samples):
        start = len(input_ids)
        input_ids += sample.input_ids
        position_ids += range(len(sample.input_ids))
        predicting += range(start + sample.prompt_length - 1, start + len(sample.input_ids) - 1)
        targets += sample.input_ids[sample.prompt_length :]
        sequences += [number] * len(sample.rl)
    if not samples:
        input_ids, position_ids, predicting, targets, sequences = [0, 0], [0, 1], [0], [0], [0]

    def stream(name: str) -> Float[Tensor, " N"]:
        values = [value for sample in samples for value in getattr(sample, name)]
        return torch.tensor(values or [0.0], dtype=torch.float32)

    steps = [Steps(rewards=(0.0,) * len(s.rl), actions=(False,) * len(s.rl)) if s.steps is None else s.steps for s in samples]
    return PackedRow(
        input_ids_T=torch.tensor(input_ids),
        position_ids_T=torch.tensor(position_ids),
        predicting_N=torch.tensor(predicting),
        targets_N=torch.tensor(targets),
        rl_N=stream("rl"),
        ce_N=stream("ce"),
        distill_N=stream("distill"),
        advantages_N=stream("advantages"),
        behaviour_N=stream("behaviour_logprobs"),
        lag_N=stream("lag"),
        rewards_N=torch.tensor([reward for part in steps for reward in part.rewards] or [0.0], dtype=torch.float32),
        action_N=torch.tensor([action for part in steps for action in part.actions] or [False]),
        sequence_N=torch.tensor(sequences),
        lengths=tuple(len(sample.rl) for sample in samples),
    )


def partition(samples: Sequence[TrainSample], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Which samples go where: ``[rank][micro-batch] -> indices``, the same number of micro-batches on every rank.

    Longest first, each into the emptiest row (Graham's rule), with the fewest rows that make it fit.  A row holds at most
    ``max_tokens`` tokens, or one sample that is longer.  Rows of like size meet at the same micro-batch, since ranks wait
    for each other there; the direction alternates, so that the ranks' totals stay close.  A pure function of the lengths.
    """
    lengths = [len(sample.input_ids) for sample in samples]
    rounds = max(1, -(-sum(min(n, max_tokens) for n in lengths) // (max_tokens * ranks)))
    while (rows := _spread(lengths, rounds * ranks, max_tokens)) is None:
        rounds += 1
    rows.sort(key=lambda row: (-sum(lengths[i] for i in row), row))
    turns = [rows[k * ranks : (k + 1) * ranks] for k in range(rounds)]
    return [[turn[rank if k % 2 == 0 else ranks - 1 - rank] for k, turn in enumerate(turns)] for rank in range(ranks)]


def _spread(lengths: Sequence[int], bins: int, max_tokens: int) -> list[list[int]] | None:
    """Indices by bin, or None if they do not fit."""
    heap = [(0, i) for i in range(bins)]
    rows: list[list[int]] = [[] for _ in range(bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, emptiest = heap[0]
        if load and load + lengths[index] > max_tokens:
            return None
        rows[emptiest].append(index)
        heapq.heapreplace(heap, (load + lengths[index], emptiest))
    return [sorted(row) for row in rows]
