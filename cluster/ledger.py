"""Every sample that was ever dispatched, in exactly one state."""

from __future__ import annotations

from typing import Literal

State = Literal["in_flight", "ready", "training", "trained", "stale", "filtered", "failed"]
STATES: tuple[State, ...] = ("in_flight", "ready", "training", "trained", "stale", "filtered", "failed")


class Ledger:
    """Counts with one invariant, checked at every move: dispatched = the sum over all states.

    >>> ledger = Ledger(); ledger.dispatch(8); ledger.move(8, "in_flight", "ready"); ledger.counts["ready"]
    8
    """

    def __init__(self) -> None:
        self.dispatched = 0
        self.counts: dict[State, int] = dict.fromkeys(STATES, 0)

    def dispatch(self, samples: int) -> None:
        self.dispatched += samples
        self.counts["in_flight"] += samples

    def move(self, samples: int, source: State, target: State) -> None:
        assert self.counts[source] >= samples, f"{samples} samples leave {source!r}, which holds {self.counts[source]}"
        self.counts[source] -= samples
        self.counts[target] += samples
        self.check()

    def check(self) -> None:
        """Invariant 4 of the design."""
        assert self.dispatched == sum(self.counts.values()), f"ledger out of balance: {self.as_dict()}"

    def as_dict(self) -> dict[str, int]:
        return {"dispatched": self.dispatched, **{str(state): count for state, count in self.counts.items()}}

    @classmethod
    def restore(cls, saved: dict[str, int]) -> Ledger:
        """From ``as_dict``.  Raises ValueError if what was saved does not balance."""
        ledger = cls()
        ledger.dispatched = saved["dispatched"]
        ledger.counts = {state: saved[state] for state in STATES}
        if ledger.dispatched != sum(ledger.counts.values()):
            raise ValueError(f"ledger: got {saved}, which does not balance")
        return ledger
