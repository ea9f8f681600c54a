"""Which requests are learnt from, and what their rounds have taught so far."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.core.speculation import TestTimeSpeculation
from slipstream.rollout.speculation.placement import Placement
from slipstream.rollout.speculation.runner_v1 import Forward, Judged, Round
from slipstream.rollout.speculation.student import Followed, Lesson, Student


def capacity(settings: TestTimeSpeculation, *, vocabulary: int, prefix_bytes: int, tokens: int, max_length: int) -> int:
    """How many requests can be followed.  Raises ValueError if not even one fits into ``max_memory_mib``."""
    rows = settings.every * tokens if settings.rounds == "all" else tokens
    each = rows * vocabulary * 4 * 2 + prefix_bytes
    fitting = int(settings.max_memory_mib * 2**20 / each)
    if fitting < 1:
        raise ValueError(
            f"rollout.speculation.tts.max_memory_mib: got {settings.max_memory_mib:g}, expected at least "
            f"{math.ceil(each / 2**20)}: {rows} rows over {vocabulary} tokens, twice, and a draft cache of "
            f"{max_length} tokens; raise it, or lower tts.every"
        )
    return min(fitting, settings.max_requests)


class Following:
    """Up to ``capacity`` requests, taken up as they come and let go when they end.

    ``tokens`` is K; ``max_length`` bounds a request.  Raises ValueError if not even one fits into ``max_memory_mib``.
    """

    def __init__(
        self, settings: TestTimeSpeculation, student: Student, placement: Placement, *, tokens: int, max_length: int
    ) -> None:
        self._settings = settings
        self._student = student
        self._placement = placement
        self.requests: dict[str, Followed] = {}
        self.capacity = capacity(
            settings,
            vocabulary=student.vocabulary,
            prefix_bytes=student.prefix_bytes(max_length),
            tokens=tokens,
            max_length=max_length,
        )

    def read(self, forward: Forward) -> None:
        """Keep the hidden states of followed requests; for a student that reads them, following begins at the first token."""
        self._let_go({one.request_id for one in forward.parts})
        for one in forward.parts:
            request = self.requests.get(one.request_id)
            if one.start == 0 and (request is not None or len(self.requests) < self.capacity):
                request = self.requests[one.request_id] = Followed()  # anew where it was preempted
            if request is None:
                continue
            features = self._placement.kept(forward.features(one))
            with self._placement.aside():
                gapless = request.append(one.start, features)
            if not gapless:
                del self.requests[one.request_id]

    def learn(self, verification: Round, running: set[str], *, with_proposed: bool) -> None:
        """Take a round's lessons down; ``with_proposed``: what the draft thought when it proposed, too."""
        self._let_go(running)
        if verification.probs_RV is None:
            return
        for one in verification.judged:
            request = self.requests.get(one.request_id)
            if request is None and len(self.requests) < self.capacity and not self._student.reads_features:
                request = self.requests[one.request_id] = Followed()
            if request is not None:
                if self._settings.rounds == "latest":
                    request.lessons.clear()
                request.lessons.append(
                    self._lesson(one, verification.logits_RV, verification.probs_RV if with_proposed else None)
                )
                request.tokens = verification.tokens(one)

    def _let_go(self, running: set[str]) -> None:
        """Forget requests that have ended, so that others find room."""
        for request_id in self.requests.keys() - running:
            del self.requests[request_id]

    def _lesson(self, one: Judged, logits_RV: Tensor, probs_RV: Tensor | None) -> Lesson:
        rows = slice(one.first_row, one.first_row + min(one.accepted + 1, one.drafted))
        target_KV = self._placement.kept(self._of_draft(logits_RV[rows]).float() / one.temperature)
        proposed_KV = None
        if probs_RV is not None:
            proposed = self._of_draft(probs_RV[rows]).clamp_min(torch.finfo(torch.float32).tiny).log()
            proposed_KV = self._placement.kept(proposed)
        return Lesson(one.length - 1, one.temperature, target_KV, proposed_KV)

    def _of_draft(self, values_KV: Tensor) -> Tensor:
        """The columns of tokens that the draft can propose: what the target would do among them is all that it can learn."""
        ids = self._student.token_ids
        return values_KV if ids is None else values_KV[:, ids]

    def new_policy(self, refilled: bool) -> None:
        """What the policy before would have written is no lesson any more; caches that are ``refilled`` are so here, too."""
        if refilled:
            self.requests.clear()
        for request in self.requests.values():
            request.lessons.clear()

    def forget(self) -> None:
        """Memory holds the lessons of ``every`` rounds; older ones go, while the update waits."""
        for request in self.requests.values():
            del request.lessons[: -self._settings.every]

    def rows(self) -> Iterator[tuple[Tensor, Lesson]]:
        """Logits of the student [K, V], at the temperature, for each lesson, which thereby is used up."""
        requests = [request for request in self.requests.values() if request.lessons]
        if not requests:
            return
        for request, rows in zip(requests, self._student.rows(requests), strict=True):
            for lesson, logits_KV in zip(request.lessons, rows, strict=True):
                yield logits_KV / lesson.temperature, lesson
            request.lessons = []
            request.trim()
