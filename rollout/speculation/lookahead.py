"""How many tokens to draft in the next round, from what acceptance and time have been so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MEMORY = 0.995
"""Weight of what was known when one more observation comes: about the last two hundred count."""
PROBE_EVERY = 32
"""Fewest rounds between two that draft a token more or less than is best, so that the times and chances there stay known."""
PROBE_COST = 0.01
"""Share of the time that such probes may lose."""


@dataclass(slots=True)
class Line:
    """y ≈ a + b · x by least squares with fading memory; b ≥ 0, and b = 0 while all x were equal."""

    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self._weight = MEMORY * self._weight + 1
        share = 1 / self._weight
        dx, dy = x - self._x, y - self._y
        self._x += share * dx
        self._y += share * dy
        self._xx += share * (dx * (x - self._x) - self._xx)
        self._xy += share * (dx * (y - self._y) - self._xy)

    def at(self, x: float) -> float:
        slope = max(self._xy / self._xx, 0.0) if self._xx > 1e-9 else 0.0
        return max(self._y + slope * (x - self._x), 0.0)


@dataclass(slots=True)
class Lookahead:
    """Chooses γ, 0 to ``most`` draft tokens per request, to write the most tokens per second.

    A round of B requests with γ drafts each writes B · E(γ) tokens, E(γ) = 1 + Σ_{k ≤ γ} Π_{j ≤ k} α_j, where α_j is the chance
    that the j-th draft is accepted if those before it were; for equal α that is (1 − α^(γ+1)) / (1 − α) (Leviathan et al. 2023,
    arXiv 2211.17192).  It takes the target's time for B · (1 + γ) tokens and the draft's for B · γ, two lines fitted to the
    rounds so far.  γ = 0 switches speculation off; a probe now and then finds out whether it pays again.
    """

    most: int
    alphas: list[float] = field(init=False)
    _seen: list[int] = field(init=False)
    _verify: Line = field(default_factory=Line)
    _draft: Line = field(default_factory=Line)
    _rounds: int = 0
    _probed: int = 0
    _up: bool = True

    def __post_init__(self) -> None:
        self.alphas = [0.5] * self.most
        self._seen = [1] * self.most  # so much is one half worth

    def judged(self, drafted: int, accepted: int) -> None:
        """One request's verdict: each draft up to the first rejected one tells something of its place."""
        for k in range(min(accepted + 1, drafted)):
            self._seen[k] += 1
            self.alphas[k] += max(1 / self._seen[k], 1 - MEMORY) * ((k < accepted) - self.alphas[k])

    def took(self, verified: int, verify_s: float, drafted: int, draft_s: float) -> None:
        """One round of decoding: so many tokens through the target, then so many drafted, over all requests."""
        self._verify.add(verified, verify_s)
        self._draft.add(drafted, draft_s)

    def expected(self, gamma: int) -> float:
        """E(γ): tokens that a request writes in a round with γ drafts.

        Each α counts with a standard error on top, or a place that had bad luck at first would never be tried again.
        """
        total, chance = 1.0, 1.0
        for alpha, seen in zip(self.alphas[:gamma], self._seen, strict=False):
            chance *= min(alpha + 0.5 / math.sqrt(min(seen, 1 / (1 - MEMORY))), 1.0)
            total += chance
        return total

    def _seconds(self, gamma: int, requests: int) -> float:
        return max(self._verify.at(requests * (1 + gamma)) + self._draft.at(requests * gamma), 1e-9)

    def best(self, requests: int) -> int:
        """The γ of the highest rate E(γ) / seconds."""
        rates = [self.expected(gamma) / self._seconds(gamma, requests) for gamma in range(self.most + 1)]
        return rates.index(max(rates))

    def choose(self, requests: int) -> int:
        """γ for the next round.  It begins with every γ once; later a probe goes one up or down in turn, when it is due."""
        self._rounds += 1
        if self._rounds <= self.most + 1:
            return self.most + 1 - self._rounds
        best = self.best(requests)
        probe = min(best + 1, self.most) if self._up else max(best - 1, 0)
        if self._rounds - self._probed < max(PROBE_EVERY, self._loss(probe, best, requests) / PROBE_COST):
            return best
        self._probed, self._up = self._rounds, not self._up
        return probe

    def _loss(self, gamma: int, best: int, requests: int) -> float:
        """What a round with ``gamma`` loses, in rounds of the best."""
        seconds = self._seconds(gamma, requests) / self._seconds(best, requests)
        return max(seconds - self.expected(gamma) / self.expected(best), 0.0)
