"""Whether learning still pays: the acceptance length beside that of the draft at rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_PER_POLICY = 0.1
"""Share of the baseline that one new policy may cost; a draft that loses more is restored, and measured at rest."""


@dataclass(slots=True)
class Watchdog:
    """Two running figures over verified drafts: a baseline over the first ``horizon`` rounds, and the average of about as many
    drafts since.

    ``below`` is the share of the baseline that the average may fall to; three standard errors of the difference of the two
    are allowed on top, so that chance alone does not ring.

    After new policy weights the next ``horizon`` rounds measure a baseline anew: what is lost there is the policy's doing,
    within reason.
    What the draft had lost under the policy before is not forgiven with it, or it could decline unseen, a little per policy.
    After an alarm the draft that was restored is measured anew, at rest: if it does no better, the baseline was luck.
    """

    horizon: int
    below: float
    baseline: float = math.nan
    average: float = math.nan
    variance: float = 0.0
    """Of the tokens of a draft, when the baseline was measured."""
    spread: float = 0.0
    """The same, running: a lucky baseline may have no variance at all."""
    drafts: int = 0
    """In the last baseline."""
    resting: bool = True
    """Whether a baseline is being measured for which the draft must not learn."""
    _rounds: int = 0
    _count: int = 0
    _sum: float = 0.0
    _squares: float = 0.0
    _kept: float = 1.0

    @property
    def measuring(self) -> bool:
        return self._rounds < self.horizon

    def count(self, tokens: Sequence[float]) -> None:
        """A round, with the tokens that each of its verified drafts gave (accepted ones and the target's own)."""
        if self.drafts:
            for one in tokens:
                off = one - self.average
                self.average += off / self.drafts
                self.spread += (off * off * (1 - 1 / self.drafts) - self.spread) / self.drafts
        if self.measuring and tokens:
            self._rounds += 1
            self._count += len(tokens)
            self._sum += sum(tokens)
            self._squares += sum(one * one for one in tokens)
            if not self.measuring:
                self._settle()

    def _settle(self) -> None:
        mean = self._sum / self._count
        self.variance = max(self._squares / self._count - mean * mean, 0.0)
        lowest = 0.0 if self.resting else (1 - MOST_PER_POLICY) * self.baseline
        self.baseline = mean if math.isnan(self.baseline) else max(min(self.baseline, mean / self._kept), lowest)
        self.drafts = self._count
        if self.resting:
            self.average, self.spread, self.resting = mean, self.variance, False

    def new_policy(self) -> None:
        """A policy that has moved may be harder to follow: the baseline may fall to what comes next, never rise.

        A measurement under way goes on: policies may come faster than ``horizon`` rounds, and none would ever end.
        """
        if self.measuring:
            return
        self._kept = min((self.average + self._error) / self.baseline, 1.0)
        self._begin()

    def _begin(self) -> None:
        self._rounds, self._count, self._sum, self._squares = 0, 0, 0.0, 0.0

    @property
    def rings(self) -> bool:
        """Whether the draft has become worse."""
        return not (self.resting or self.measuring) and self.average < self.below * self.baseline - 3 * self._error

    @property
    def _error(self) -> float:
        """Standard error of average − baseline; an exponential average over h drafts has the variance of a mean over 2 h."""
        return math.sqrt(max(self.variance, self.spread) * 1.5 / self.drafts)

    @property
    def content(self) -> bool:
        """Whether the draft is at least as good as at rest."""
        return not self.resting and self.average >= self.baseline

    def restart(self) -> None:
        """The draft was restored: it rests until it is measured."""
        self.resting, self._kept = True, 1.0
        self._begin()
