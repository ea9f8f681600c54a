"""Advantages of whole responses from the rewards of their siblings.

Sizes: ``G`` siblings of a group.  Plain floats: a batch has hundreds of rewards, not millions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Literal

Kind = Literal["grpo", "rloo", "reinforce"]

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that rewards which differ by rounding only do not become advantages of ±1."""


def group_advantages(rewards_G: Sequence[float], *, kind: Kind, scale_by_std: bool) -> list[float]:
    """Advantages ``[G]`` of one group; every sibling counts in its statistics, whatever the staleness of its tokens.

    - ``grpo``: (r − mean) / (std + 1e-6) with the population standard deviation (Shao et al. 2024, arXiv 2402.03300), or
      r − mean without ``scale_by_std`` (Dr.GRPO, Liu et al. 2025, arXiv 2503.20783).
    - ``rloo``: r − mean of the other siblings, which is G / (G − 1) · (r − mean) (Ahmadian et al. 2024, arXiv 2402.14740).
    - ``reinforce``: the reward itself; ``batch_advantages`` subtracts the baseline, which is not the group's.

    ``scale_by_std`` concerns ``grpo`` only.  ``[1, 0, 0, 0]`` gives 0.75 and −0.25 for Dr.GRPO and 1 and −1/3 for ``rloo``.
    Equal rewards (and a group of one) give exact zeros for ``grpo`` and ``rloo``.
    Raises ValueError for rewards that are not finite or an unknown ``kind``.
    """
    _require_finite([rewards_G])
    if kind == "reinforce":
        return [float(r) for r in rewards_G]
    if not has_signal(rewards_G, kind):
        return [0.0] * len(rewards_G)
    mean = fmean(rewards_G)
    if kind == "rloo":
        scale = len(rewards_G) / (len(rewards_G) - 1)
    else:
        scale = 1 / (pstdev(rewards_G) + STD_EPSILON) if scale_by_std else 1.0
    return [scale * (r - mean) for r in rewards_G]


def batch_advantages(rewards_by_group: Sequence[Sequence[float]], *, kind: Kind, scale_by_std: bool) -> list[list[float]]:
    """Advantages of every group of a batch, in the shape of ``rewards_by_group``.

    ``grpo`` and ``rloo`` look at one group at a time; ``reinforce`` subtracts the mean reward over the whole batch.
    Raises ValueError for rewards that are not finite, all of them named by group and sample, or an unknown ``kind``.
    """
    _require_finite(rewards_by_group)
    advantages = [group_advantages(rewards_G, kind=kind, scale_by_std=scale_by_std) for rewards_G in rewards_by_group]
    flat = [reward for rewards_G in rewards_by_group for reward in rewards_G]
    baseline = fmean(flat) if kind == "reinforce" and flat else 0.0
    return [[advantage - baseline for advantage in advantages_G] for advantages_G in advantages]


def has_signal(rewards_G: Sequence[float], kind: Kind) -> bool:
    """Whether the group can move the policy: False where ``grpo`` or ``rloo`` would give advantages of zero throughout."""
    if kind not in ("grpo", "rloo", "reinforce"):
        raise ValueError(f"kind of advantage: got {kind!r}, expected 'grpo', 'rloo' or 'reinforce'")
    return kind == "reinforce" or len(set(rewards_G)) > 1


def _require_finite(rewards_by_group: Sequence[Sequence[float]]) -> None:
    problems = [
        f"group {g} sample {s}: {reward}"
        for g, rewards_G in enumerate(rewards_by_group)
        for s, reward in enumerate(rewards_G)
        if not math.isfinite(reward)
    ]
    if problems:
        raise ValueError(
            f"rewards: got {'; '.join(problems)}, expected finite numbers; "
            "a grader that cannot score must raise, so that the group counts as failed"
        )
