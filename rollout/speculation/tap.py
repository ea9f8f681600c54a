"""What listens to the drafts' verdicts inside vLLM's worker: it counts them, and lets the draft learn."""

from __future__ import annotations

from typing import Any

from slipstream.rollout.speculation.acceptance import QUARTERS
from slipstream.rollout.speculation.lookahead import Lookahead
from slipstream.rollout.speculation.runner_v1 import Round, RunnerV1
from slipstream.rollout.speculation.updater import Updater


class Tap:
    """Listens to every verification.  ``response_limit`` is ``sampling.max_tokens``."""

    def __init__(
        self, runner: RunnerV1, response_limit: int, updater: Updater | None = None, lookahead: Lookahead | None = None
    ) -> None:
        self._runner = runner
        self._limit = response_limit
        self._rounds = [0] * QUARTERS
        self._accepted = [0] * QUARTERS
        self._updater = updater
        self._lookahead = lookahead
        if lookahead is not None:
            runner.look_ahead(lookahead)
        if updater is not None:
            runner.judge_undefined_drafts()
            if updater.reads_features:
                runner.after_forward(updater.read)
        runner.after_verification(self.observe)

    def observe(self, verification: Round) -> None:
        for one in verification.judged:
            quarter = min((one.length - one.prompt_length) * QUARTERS // self._limit, QUARTERS - 1)
            self._rounds[quarter] += 1
            self._accepted[quarter] += one.accepted
            if self._lookahead is not None:
                self._lookahead.judged(one.drafted, one.accepted)
        if self._updater is not None:
            self._updater.observe(verification, self._runner.running())

    def new_policy(self, batch: int, refilled: bool) -> None:
        if self._updater is not None:
            self._updater.new_policy(batch, refilled)

    @property
    def updater(self) -> Updater:
        assert self._updater is not None, "only a draft that learns has something to save or to share"
        return self._updater

    def report(self) -> dict[str, Any]:
        """Counters since the start, and under ``learning`` what the updater says (None without one)."""
        return {
            "rounds_by_quarter": list(self._rounds),
            "accepted_by_quarter": list(self._accepted),
            "learning": self._updater.report() if self._updater is not None else None,
        }
