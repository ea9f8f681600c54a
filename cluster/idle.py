"""Groups in a row that move nothing: a run of nothing else would go on for ever."""

from __future__ import annotations

from typing import NoReturn

from slipstream.rollout.failures import GroupFailed


class IdleGroups:
    """Counts groups that failed, or had equal rewards, since the last one with a signal.  Raises RuntimeError at ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._last = "", ""
        self.signal()

    def signal(self) -> None:
        """A group can move the policy: the count starts again."""
        self._count, self._failed = 0, 0

    def failed(self, problem: GroupFailed) -> None:
        self._failed += 1
        reason = " ".join(str(problem).split())
        self._one_more(f"failed: {reason}", "Mend what raised it; logs/engine-*.log has the tracebacks")

    def equal(self, reward: float) -> None:
        """All siblings of a group got ``reward``."""
        self._one_more(
            f"had equal rewards, {reward:g} throughout",
            "If that is the best reward, the task is solved: lower schedule.steps or take harder tasks; if it is the worst, "
            "the task is out of reach, or the reward function does not fit the answers",
        )

    def ended(self) -> None:
        """There are no more tasks.  Raises RuntimeError if there were, and none had a signal."""
        if self._count:
            self._raise("and the data has ended")

    def _one_more(self, how: str, advice: str) -> None:
        self._count += 1
        self._last = how, advice
        if self._count >= self._limit:
            self._raise("schedule.max_idle_groups")

    def _raise(self, why: str) -> NoReturn:
        how, advice = self._last
        if self._failed == self._count:
            raise RuntimeError(f"all {self._count} groups {how} ({why}). {advice}")
        failed = f", {self._failed} of them failed" if self._failed else ""
        raise RuntimeError(
            f"no learning signal from the last {self._count} groups ({why}){failed}; the last one {how}. {advice}"
        )
