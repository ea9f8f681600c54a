"""Whether learning still pays: the acceptance length beside that of the draft at rest."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Watchdog:
    """Two running figures over verified drafts: a baseline over the first ``horizon``, and the average of about the last.

    ``below`` is the share of the baseline that the average may fall to; three standard errors of the difference of the two
    are allowed on top, so that chance alone does not ring.

    After new policy weights the next ``horizon`` drafts measure a baseline anew: what is lost there is the policy's doing.
    What the draft had lost under the policy before is not forgiven with it, or it could decline unseen, a little per policy.
    """

    horizon: int
    below: float
    baseline: float = math.nan
    average: float = math.nan
    variance: float = 0.0
    _count: int = 0
    _sum: float = 0.0
    _squares: float = 0.0
    _kept: float = 1.0

    @property
    def resting(self) -> bool:
        """Whether the first baseline is still being measured; the draft must not learn meanwhile."""
        return math.isnan(self.baseline)

    @property
    def measuring(self) -> bool:
        return self._count < self.horizon

    def count(self, tokens: int) -> None:
        """One verified draft gave so many tokens (accepted ones and the target's own)."""
        if not math.isnan(self.average):
            self.average += (tokens - self.average) / self.horizon
        if self.measuring:
            self._count += 1
            self._sum += tokens
            self._squares += tokens * tokens
            if not self.measuring:
                self._settle()

    def _settle(self) -> None:
        mean = self._sum / self._count
        self.variance = max(self._squares / self._count - mean * mean, 0.0)
        self.baseline = mean if math.isnan(self.baseline) else min(self.baseline, mean / self._kept)
        if math.isnan(self.average):
            self.average = mean

    def new_policy(self) -> None:
        """A policy that has moved may be harder to follow: the baseline may fall to what comes next, never rise."""
        if self.resting:
            return
        if not self.measuring:
            self._kept = min((self.average + self._error) / self.baseline, 1.0)
        self._count, self._sum, self._squares = 0, 0.0, 0.0

    @property
    def rings(self) -> bool:
        """Whether the draft has become worse."""
        return not (self.resting or self.measuring) and self.average < self.below * self.baseline - 3 * self._error

    @property
    def _error(self) -> float:
        """Standard error of average − baseline; an exponential average over h drafts has the variance of a mean over 2 h."""
        return math.sqrt(self.variance * 1.5 / self.horizon)

    @property
    def content(self) -> bool:
        """Whether the draft is at least as good as at rest."""
        return not self.resting and self.average >= self.baseline

    def restart(self) -> None:
        """After the draft was restored: the average begins at the baseline again."""
        self.average, self._kept = self.baseline, 1.0
