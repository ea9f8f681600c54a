"""How often drafts are accepted: counters that only grow, and the figures between two readings of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.metrics import Mean, Metrics, Sum

QUARTERS = 4
"""Parts of ``sampling.max_tokens`` in which acceptance is told apart."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts since an engine's start.  A round is one verification of one request that had a draft.

    ``rounds_by_accepted`` [K + 1]: rounds in which exactly so many drafts were accepted, of responses that have ended.
    ``rounds_by_quarter`` and ``accepted_by_quarter`` [4]: rounds, and accepted drafts in them, by the quarter of
    ``sampling.max_tokens`` in which the round began; of running responses too; zeros where vLLM's runner is not watched.

    Example, K = 2: ``Acceptance((5, 3, 2), 20, (4, 3, 2, 1), (2, 2, 2, 1))`` has an acceptance length of
    1 + (3 · 1 + 2 · 2) / 10 = 1.7.
    """

    rounds_by_accepted: tuple[int, ...]
    drafted: int = 0
    rounds_by_quarter: tuple[int, ...] = (0,) * QUARTERS
    accepted_by_quarter: tuple[int, ...] = (0,) * QUARTERS

    @property
    def rounds(self) -> int:
        return sum(self.rounds_by_accepted)

    @property
    def accepted(self) -> int:
        return sum(count * accepted for accepted, count in enumerate(self.rounds_by_accepted))

    def at_least(self, k: int) -> int:
        """Rounds in which the k-th draft token was accepted (k from 1)."""
        return sum(self.rounds_by_accepted[k:])

    def plus(self, other: Acceptance) -> Acceptance:
        return self._with(other, 1)

    def minus(self, earlier: Acceptance) -> Acceptance:
        """What came after ``earlier``, a reading of the same counters."""
        return self._with(earlier, -1)

    def _with(self, other: Acceptance, sign: int) -> Acceptance:
        return Acceptance(
            _added(self.rounds_by_accepted, other.rounds_by_accepted, sign),
            self.drafted + sign * other.drafted,
            _added(self.rounds_by_quarter, other.rounds_by_quarter, sign),
            _added(self.accepted_by_quarter, other.accepted_by_quarter, sign),
        )

    def metrics(self) -> Metrics:
        """``draft/*``: tokens per round of the target, overall, by draft position and by quarter of the response limit.

        ``draft/acceptance_pos_k`` is the share of rounds whose first k drafts were accepted; rounds with fewer drafts than k
        count as such in which the k-th was not.
        """
        found: Metrics = {"draft/rounds": Sum(self.rounds), "draft/accepted": Sum(self.accepted)}
        if rounds := self.rounds:
            found["draft/tokens"] = Mean(self.drafted / rounds, rounds)
            found["draft/acceptance_length"] = Mean(1 + self.accepted / rounds, rounds)
            for k in range(1, len(self.rounds_by_accepted)):
                found[f"draft/acceptance_pos_{k}"] = Mean(self.at_least(k) / rounds, rounds)
        for quarter, (rounds, accepted) in enumerate(zip(self.rounds_by_quarter, self.accepted_by_quarter, strict=True)):
            if rounds:
                found[f"draft/acceptance_length_q{quarter + 1}"] = Mean(1 + accepted / rounds, rounds)
        return found


@dataclass(frozen=True, slots=True)
class Learning:
    """What a learning draft has done since the engine's start.

    ``postponed`` rounds had an update due that would have cost too much; ``update_s`` of the engine's ``busy_s`` seconds went
    into updates; ``loss`` is the last one's (nan before the first); ``learned_batch`` was the policy's batch then, and
    ``policy_batch`` is what it is now, in this engine.
    ``baseline`` is the acceptance length that the watchdog compares with, nan until it is measured.
    """

    updates: int
    kills: int
    postponed: int
    loss: float
    lr: float
    update_s: float
    busy_s: float
    policy_batch: int
    learned_batch: int
    baseline: float


@dataclass(frozen=True, slots=True)
class DraftStats:
    """One engine's drafts; ``learning`` is None where the draft does not learn."""

    acceptance: Acceptance
    learning: Learning | None = None


def _added(one: Sequence[int], other: Sequence[int], sign: int) -> tuple[int, ...]:
    return tuple(a + sign * b for a, b in zip(one, other, strict=True))
