"""Who was idle and how many tokens flowed: of the last step, and of the training since it began."""

from __future__ import annotations

import time
from collections.abc import Sequence

from slipstream.cluster.actors import EngineStats
from slipstream.core.metrics import Mean, Metrics


class Usage:
    """Idle shares and throughput.  The clock starts at ``begin``; evaluation and warm start before it do not count.

    An engine is idle while vLLM holds no request; the learner is idle while it waits for groups.  Engines' counters count from
    their own start, so what they had at ``begin`` is taken off.  Trained tokens are those that the learner went through:
    prompts, and every epoch, count.
    """

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._engines = 1
        self._tokens_before = self._tokens = 0
        self._busy_before = self._busy = 0.0
        self._waited = 0.0
        self._trained = 0.0

    def begin(self, stats: Sequence[EngineStats]) -> None:
        self._start = self._last = time.perf_counter()
        self._engines = len(stats)
        self._tokens_before = self._tokens = sum(s.sampled_tokens for s in stats)
        self._busy_before = self._busy = sum(s.busy_s for s in stats)

    def step(self, stats: Sequence[EngineStats], waited_s: float, trained_tokens: float) -> Metrics:
        """Figures of the time since the last call."""
        now = time.perf_counter()
        wall = now - self._last
        tokens, busy = sum(s.sampled_tokens for s in stats), sum(s.busy_s for s in stats)
        figures: Metrics = {
            "idle/learner": Mean(min(1.0, waited_s / wall)),
            "idle/rollout": Mean(max(0.0, 1.0 - (busy - self._busy) / (wall * self._engines))),
            "throughput/rollout_tokens_per_s": Mean((tokens - self._tokens) / wall),
            "throughput/trained_tokens_per_s": Mean(trained_tokens / wall),
        }
        self._last, self._tokens, self._busy = now, tokens, busy
        self._waited += waited_s
        self._trained += trained_tokens
        return figures

    def idle(self) -> dict[str, float]:
        wall = self._wall
        busy = (self._busy - self._busy_before) / (wall * self._engines)
        return {"learner": min(1.0, self._waited / wall), "rollout": min(1.0, max(0.0, 1.0 - busy))}

    def throughput(self) -> dict[str, float]:
        tokens = self._tokens - self._tokens_before
        return {"rollout_tokens_per_s": tokens / self._wall, "trained_tokens_per_s": self._trained / self._wall}

    @property
    def _wall(self) -> float:
        return max(self._last - self._start, 1e-9)
