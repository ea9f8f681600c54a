"""What a head on the target's hidden states drafts from, and how its twin is asked.

Shapes: S context positions and A anchors, of any number of sequences in one row; P positions before them whose keys and values
are known; M = P + S; K draft tokens; H hidden size, F target features; N KV heads of D; V the head's own (draft) vocabulary,
W the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Past:
    """Keys and values of earlier positions for each layer of the head, as the weights of their time made them; no gradient."""

    keys: tuple[Float[Tensor, "P N D"], ...]
    values: tuple[Float[Tensor, "P N D"], ...]
    sequence_P: Int[Tensor, " P"]

    def then(self, new: Past, count: int | None = None) -> Past:
        """These positions and the first ``count`` of ``new``, all by default."""

        def joined(known: tuple[Tensor, ...], more: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(torch.cat([a, b[:count]]) for a, b in zip(known, more, strict=True))

        sequence_P = torch.cat([self.sequence_P, new.sequence_P[:count]])
        return Past(joined(self.keys, new.keys), joined(self.values, new.values), sequence_P)


@dataclass(frozen=True, slots=True)
class Context:
    """What the target has committed.  Entry s is the position of a token, with the features that the target had there.

    ``next_ids_S``: the token *after* it.  ``sequence_S`` says to which sequence an entry belongs; within one, entries stand in
    order, and all of ``past`` comes before them.
    """

    next_ids_S: Int[Tensor, " S"]
    features_SF: Float[Tensor, "S F"]
    positions_S: Int[Tensor, " S"]
    sequence_S: Int[Tensor, " S"]
    past: Past | None = None

    @classmethod
    def of_one(
        cls, next_ids_S: Int[Tensor, " S"], features_SF: Float[Tensor, "S F"], first: int = 0, past: Past | None = None
    ) -> Context:
        """One sequence, its entries at the positions from ``first`` on."""
        positions_S = torch.arange(first, first + len(next_ids_S), device=next_ids_S.device)
        return cls(next_ids_S, features_SF, positions_S, torch.zeros_like(positions_S), past)


@dataclass(frozen=True, slots=True)
class Unrolled:
    """``logits_KAV[k, a]``: of the (k + 1)-th draft token after anchor a.  ``past``: of the context, to go on from later."""

    logits_KAV: Float[Tensor, "K A V"]
    past: Past


def with_past(own: tuple[Tensor, Tensor], context: Context, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the past and of the context, ``[M, N, D]``."""
    if context.past is None:
        return own
    return torch.cat([context.past.keys[layer], own[0]]), torch.cat([context.past.values[layer], own[1]])


def visible(context: Context) -> Bool[Tensor, "S M"]:
    """Which known positions a position of the context sees, its own among them."""
    mine = context.sequence_S
    known = mine if context.past is None else torch.cat([context.past.sequence_P, mine])
    earlier = torch.ones(len(mine), len(known), dtype=torch.bool, device=mine.device).tril(diagonal=len(known) - len(mine))
    return earlier & (mine[:, None] == known[None])


def embedded(ids: Int[Tensor, " *n"], embedding: Float[Tensor, "W H"]) -> Float[Tensor, "*n H"]:
    """Rows of the target's embedding, which may be of half precision where a twin is of float32."""
    return F.embedding(ids, embedding).float()


def scored(hidden: Float[Tensor, "*n H"], output_head: Float[Tensor, "V H"]) -> Float[Tensor, "*n V"]:
    """Logits by an output head, in its own precision, as the engine has them."""
    return F.linear(hidden.to(output_head.dtype), output_head).float()
