"""Advantages of whole responses from the rewards of a batch.

Sizes: ``G`` siblings of a group.  Plain floats: a batch has hundreds of rewards, not millions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

from slipstream.core.algorithms import OF_GROUPS

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that rewards which differ by rounding only do not become advantages of ±1."""

Rewards = Sequence[Sequence[float]]
"""The rewards of a batch by group; every sibling counts in the statistics, whatever the staleness of its tokens."""


def grpo(rewards: Rewards) -> list[list[float]]:
    """(r − mean) / (std + 1e-6) of the group, population standard deviation: Shao et al. 2024, arXiv 2402.03300."""
    return [_standardised(rewards_G) for rewards_G in rewards]


def dr_grpo(rewards: Rewards) -> list[list[float]]:
    """r − mean of the group: Liu et al. 2025 (Dr.GRPO), arXiv 2503.20783."""
    return [_centred(rewards_G) for rewards_G in rewards]


def rloo(rewards: Rewards) -> list[list[float]]:
    """r − mean of the other siblings, G / (G − 1) · (r − mean): Ahmadian et al. 2024, arXiv 2402.14740."""
    return [[len(rewards_G) / max(len(rewards_G) - 1, 1) * a for a in _centred(rewards_G)] for rewards_G in rewards]


def reinforce(rewards: Rewards) -> list[list[float]]:
    """r − mean of the batch."""
    return _whole(rewards, _centred)


def reinforce_pp(rewards: Rewards) -> list[list[float]]:
    """(r − mean) / (std + 1e-6) of the batch, over samples: Hu et al. 2025 (REINFORCE++), arXiv 2501.03262."""
    return _whole(rewards, _standardised)


def reinforce_pp_baseline(rewards: Rewards) -> list[list[float]]:
    """r − mean of the group, then standardised over the batch: REINFORCE++ with baseline, same paper."""
    return _whole(dr_grpo(rewards), _standardised)


def none(rewards: Rewards) -> list[list[float]]:
    """Zeros: the rewards are looked at and train nothing (pure distillation)."""
    return [[0.0] * len(rewards_G) for rewards_G in rewards]


def gae(rewards: Rewards) -> list[list[float]]:
    """Zeros: the learner makes them token by token, from its critic's values (``algos.gae``)."""
    return none(rewards)


ADVANTAGES: dict[str, Callable[[Rewards], list[list[float]]]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gae": gae,
    "none": none,
}


def batch_advantages(rewards: Rewards, kind: str) -> list[list[float]]:
    """Advantages of every response of a batch, in the shape of ``rewards``.

    ``[[1, 0, 0, 0]]`` gives 0.75 and −0.25 for ``dr_grpo``, 1 and −1/3 for ``rloo``.  Equal rewards (of a group, or of the
    batch, as the kind has it) give exact zeros.
    Raises ValueError for rewards that are not finite, all of them named by group and sample, or an unknown ``kind``.
    """
    _require_finite(rewards)
    return _known(kind)(rewards)


def has_signal(rewards_G: Sequence[float], kind: str) -> bool:
    """Whether the group can move the policy: False where advantages ``OF_GROUPS`` would be zero throughout.

    Raises ValueError for an unknown ``kind``.
    """
    _known(kind)
    return kind not in OF_GROUPS or len(set(rewards_G)) > 1


def _known(kind: str) -> Callable[[Rewards], list[list[float]]]:
    if kind not in ADVANTAGES:
        raise ValueError(f"kind of advantage: got {kind!r}, expected one of {', '.join(ADVANTAGES)}")
    return ADVANTAGES[kind]


def _centred(rewards_N: Sequence[float]) -> list[float]:
    if len(set(rewards_N)) < 2:  # exact zeros: the mean of three times 0.1 is not 0.1
        return [0.0] * len(rewards_N)
    mean = fmean(rewards_N)
    return [r - mean for r in rewards_N]


def _standardised(rewards_N: Sequence[float]) -> list[float]:
    if len(rewards_N) < 2:
        return [0.0] * len(rewards_N)
    scale = 1 / (pstdev(rewards_N) + STD_EPSILON)
    return [scale * a for a in _centred(rewards_N)]


def _whole(rewards: Rewards, function: Callable[[Sequence[float]], list[float]]) -> list[list[float]]:
    """``function`` of all rewards of the batch, cut into groups again."""
    flat = iter(function([r for rewards_G in rewards for r in rewards_G]))
    return [[next(flat) for _ in rewards_G] for rewards_G in rewards]


def _require_finite(rewards: Rewards) -> None:
    problems = [
        f"group {g} sample {s}: {reward}"
        for g, rewards_G in enumerate(rewards)
        for s, reward in enumerate(rewards_G)
        if not math.isfinite(reward)
    ]
    if problems:
        raise ValueError(
            f"rewards: got {'; '.join(problems)}, expected finite numbers; "
            "a grader that cannot score must raise, so that the group counts as failed"
        )
