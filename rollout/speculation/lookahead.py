"""How many tokens to draft: what has been accepted, by position, against what a round has cost, by batch size.

With acceptance α a round of γ drafts is worth (1 − α^(γ+1)) / (1 − α) tokens and costs γ · c + 1 target steps (Leviathan et al.
2023, arXiv 2211.17192).  Here both sides are measured: α differs by position, and a round's cost grows with the batch, until
speculation does not pay at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

MEMORY = 0.99
"""Weight that yesterday's acceptance keeps with every round: a hundred rounds are remembered."""
COST_MEMORY = 0.9
TRIALS = 3
"""Rounds of a length before its cost is believed."""
TRY_EVERY = 40
"""Rounds between two tries of a neighbouring length, and twice as many while it is off."""


class Lookahead:
    """Chooses draft lengths from 0 (off) to ``most`` for each batch size.

    ``observe`` every round that only decoded; then ``choose`` the next round's length.  A batch size it has not seen begins
    with a few rounds at ``most``, none and half, which give the line that the costs of other lengths are read from.
    """

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"most: got {most}, expected at least 1 draft token")
        self.most = most
        self._tried = [0.0] * most
        self._accepted = [0.0] * most
        self._costs: dict[int, _Costs] = defaultdict(lambda: _Costs(most))

    def observe(self, batch: int, drafted: int, accepted: Sequence[int], seconds: float) -> None:
        """A round of ``batch`` requests with ``drafted`` draft tokens each, ``accepted`` of them held, a number per request."""
        for k in range(drafted):
            reached = sum(a >= k for a in accepted)
            self._tried[k] = MEMORY * self._tried[k] + reached
            self._accepted[k] = MEMORY * self._accepted[k] + sum(a > k for a in accepted)
        self._costs[_size(batch)].observe(drafted, seconds)

    def choose(self, batch: int) -> int:
        """The next round's draft length."""
        costs = self._costs[_size(batch)]
        if (unknown := costs.unknown()) is not None:
            return unknown
        values = self.tokens()
        rates = [values[n] / costs.of(n) for n in range(self.most + 1)]
        return costs.settle(max(range(self.most + 1), key=rates.__getitem__), rates)

    def tokens(self) -> list[float]:
        """Expected tokens of a round with 0 … ``most`` drafts: 1 + Σ_k Π_{i ≤ k} α_i.

        A position that has never been reached is as good as the one before it.
        """
        found, alive, rate = [1.0], 1.0, 0.5
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            rate = (accepted + rate) / (tried + 1.0)  # one trial's worth of belief in the position before
            alive *= rate
            found.append(found[-1] + alive)
        return found


class _Costs:
    """Seconds of a round by draft length, for batches of about one size, and when to try another length."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds: dict[int, float] = {}
        self._seen: dict[int, int] = defaultdict(int)
        self._chosen = most
        self._rounds = 0
        self._tries = 0

    def observe(self, drafted: int, seconds: float) -> None:
        self._seen[drafted] += 1
        before = self._seconds.get(drafted)
        self._seconds[drafted] = (
            seconds if before is None else COST_MEMORY * before + (1 - COST_MEMORY) * min(seconds, 3 * before)
        )

    def unknown(self) -> int | None:
        """A length that still has to be tried before anything can be said."""
        for length in (self._most, 0, self._most // 2):
            if self._seen[length] < TRIALS:
                return length
        return None

    def of(self, length: int) -> float:
        """Measured, or read off the line through all that are."""
        if self._seen[length] >= TRIALS:
            return self._seconds[length]
        known = [(n, s) for n, s in self._seconds.items() if self._seen[n] >= TRIALS]
        mean_n, mean_s = (sum(values) / len(known) for values in zip(*known, strict=True))
        slope = sum((n - mean_n) * (s - mean_s) for n, s in known) / sum((n - mean_n) ** 2 for n, _ in known)
        return max(mean_s + max(slope, 0.0) * (length - mean_n), 1e-9)

    def settle(self, best: int, rates: Sequence[float]) -> int:
        """``best`` where it is clearly better than the last choice; now and then a neighbour, to see whether it still is."""
        if rates[best] > 1.01 * rates[self._chosen]:
            self._chosen = best
        self._rounds += 1
        if self._rounds % (TRY_EVERY if self._chosen else 2 * TRY_EVERY):
            return self._chosen
        self._tries += 1
        neighbours = [n for n in (self._chosen + 1, self._chosen - 1) if 0 <= n <= self._most]
        return neighbours[self._tries % len(neighbours)]


def _size(batch: int) -> int:
    """Batches of one power of two are alike."""
    return batch.bit_length()
