"""Reductions as per-token weights and one global denominator, so a loss does not depend on ranks, rows or micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.algos.sequences import sequence_sum

Mode = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(mode: Mode, masks: Sequence[Sequence[bool]], *, max_tokens: int) -> tuple[list[list[float]], float]:
    """``(weights, denominator)`` such that the loss of the batch is Σ weight · token loss / denominator.

    ``masks`` holds the loss mask of every sequence of the optimizer step, over all ranks; ``weights`` has its shape.

    ==================  ============================  ===========================================
    mode                weight of an unmasked token   denominator
    ==================  ============================  ===========================================
    ``token_mean``      1                             unmasked tokens
    ``sequence_mean``   1 / unmasked in its sequence  sequences with an unmasked token
    ``constant``        1                             sequences × ``max_tokens`` (Dr.GRPO)
    ==================  ============================  ===========================================

    Masked tokens weigh 0.  The denominator is 0.0 where no token is left: the stream is empty, and nothing may divide by it.
    ``token_mean`` of ``[[True, True, False], [True]]`` is ``([[1, 1, 0], [1]], 3)``, ``sequence_mean`` is
    ``([[.5, .5, 0], [1]], 2)``, ``constant`` with ``max_tokens=4`` is ``([[1, 1, 0], [1]], 8)``.

    Raises ValueError for an unknown mode or ``max_tokens`` below 1.
    """
    if mode not in ("token_mean", "sequence_mean", "constant"):
        raise ValueError(f"reduction: got {mode!r}, expected 'token_mean', 'sequence_mean' or 'constant'")
    if max_tokens < 1:
        raise ValueError(f"max_tokens: got {max_tokens}, expected at least 1, the longest response that the sampler may write")
    counts = [sum(mask) for mask in masks]
    if not any(counts):
        return [[0.0] * len(mask) for mask in masks], 0.0
    shares = [1 / count if mode == "sequence_mean" and count else 1.0 for count in counts]
    weights = [[share if kept else 0.0 for kept in mask] for share, mask in zip(shares, masks, strict=True)]
    denominators = {
        "token_mean": sum(counts),
        "sequence_mean": sum(count > 0 for count in counts),
        "constant": len(masks) * max_tokens,
    }
    return weights, float(denominators[mode])


def reduce_to_kept(
    mode: Mode, weights_T: Float[Tensor, " T"], kept_T: Bool[Tensor, " T"], sequence_T: Int[Tensor, " T"]
) -> tuple[Float[Tensor, " T"], Float[Tensor, ""]]:
    """``(weights_T, share)`` once some of the tokens of ``token_weights`` have been rejected: they leave the denominator too.

    All ``T`` tokens had weight before; the new denominator is the sum of ``share`` over all rows and ranks.

    ==================  =======================================  ================================
    mode                weight of a kept token                   share of these tokens
    ==================  =======================================  ================================
    ``token_mean``      as it was                                kept tokens
    ``sequence_mean``   × tokens / kept tokens of its sequence   sequences with a kept token
    ``constant``        as it was                                0: the denominator stays
    ==================  =======================================  ================================
    """
    kept = kept_T.to(weights_T.dtype)
    weights_T = weights_T * kept
    if mode == "token_mean":
        return weights_T, kept.sum()
    if mode == "constant":
        return weights_T, kept.new_zeros(())
    of_sequence_T = sequence_sum(kept, sequence_T)
    rescale_T = sequence_sum(torch.ones_like(kept), sequence_T) / of_sequence_T.clamp(min=1)
    return weights_T * rescale_T, (kept / of_sequence_T.clamp(min=1)).sum()
