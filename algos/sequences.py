"""Sums and means over the sequences of a packed row, laid out again per token."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def sequence_sum(values_T: Float[Tensor, " T"], sequence_T: Int[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Each token's sum over the tokens of its own sequence.  ``[1, 2, 5]`` of sequences ``[0, 0, 3]`` gives ``[3, 3, 5]``.

    ``sequence_T`` numbers the sequences of the row from 0; numbers may be missing, and the order is free.
    """
    if len(values_T) == 0:
        return values_T
    sums_S = values_T.new_zeros(int(sequence_T.max()) + 1).index_add(0, sequence_T, values_T)
    return sums_S[sequence_T]


def sequence_mean(values_T: Float[Tensor, " T"], sequence_T: Int[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Each token's mean over the tokens of its own sequence."""
    return sequence_sum(values_T, sequence_T) / sequence_sum(torch.ones_like(values_T), sequence_T)
