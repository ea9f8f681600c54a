"""Drafts of several engines become one: each has seen other requests, and none of them sees much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DraftShare = tuple[dict[str, np.ndarray], int]
"""The weights of an engine's draft, and how many of its tokens have been accepted since it was last shared."""


def average(shares: Sequence[DraftShare]) -> dict[str, np.ndarray] | None:
    """Σ_e a_e θ_e / Σ_e a_e over engines e with a_e accepted tokens; equal parts where none had any.

    Drafts with weights that are not finite are left out; None if that leaves none.
    """
    sound = [(weights, accepted) for weights, accepted in shares if all(np.isfinite(w).all() for w in weights.values())]
    if not sound:
        return None
    accepted = np.array([count for _, count in sound], dtype=np.float64)
    parts = accepted / accepted.sum() if accepted.any() else np.full(len(sound), 1 / len(sound))
    return {
        name: sum(part * weights[name].astype(np.float64) for part, (weights, _) in zip(parts, sound, strict=True)).astype(
            first.dtype
        )
        for name, first in sound[0][0].items()
    }
