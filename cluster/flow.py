"""The flow of groups from dispatch to commit: slots, buffer and ledger, with no actor, clock or network inside.

A *slot* is one group, held from dispatch until every engine has confirmed the version that its batch produced; groups that are
filtered, failed or dropped as stale free theirs at once.  With η = ``max_staleness`` and G = ``groups_per_step`` there are
S = (η + 1)·G slots, so at η = 0 this is the synchronous algorithm.

v0 of a group is the version of its oldest token, or its dispatch version while it is in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from slipstream.cluster.ledger import Ledger
from slipstream.cluster.staleness import fresh, fully_stale, outcome
from slipstream.core.metrics import Last, Mean, Metrics
from slipstream.core.records import Group, WeightVersion
from slipstream.core.schema import Schedule


@dataclass(slots=True)
class Flight:
    """A group on its way: what is known of it before its tokens are."""

    version: WeightVersion
    samples: int
    order: int


class Flow:
    """The state machine that the controller drives; every method is one event.

    ``take`` gives the next batch or None; then ``commit`` (the learner has stepped) and, when every engine holds the new
    weights, ``confirm``.  ``close`` says that no more groups will be dispatched, so that the last batch may be short.
    """

    def __init__(
        self, schedule: Schedule, start: WeightVersion, ledger: Ledger | None = None, *, filter_overlong: bool = False
    ) -> None:
        self.schedule = schedule
        self.bound = schedule.max_staleness
        self.groups_per_step = schedule.groups_per_step
        self.on_stale = schedule.on_stale
        self.slots = (self.bound + 1) * self.groups_per_step
        self.learner = start
        self.confirmed = start
        self.ledger = ledger or Ledger()
        self.filter_overlong = filter_overlong
        self.in_flight: dict[str, Flight] = {}
        self.ready: dict[str, tuple[Group, int]] = {}
        self.training: tuple[Group, ...] = ()
        self._unconfirmed: deque[tuple[WeightVersion, int]] = deque()
        self._order = 0
        self._closed = False

    # ---- slots

    @property
    def held(self) -> int:
        """Slots in use: in flight, ready, training, and trained but not yet confirmed."""
        waiting = sum(groups for _, groups in self._unconfirmed)
        return len(self.in_flight) + len(self.ready) + len(self.training) + waiting

    @property
    def free(self) -> int:
        return 0 if self._closed else self.slots - self.held

    @property
    def live(self) -> int:
        """Groups that can still end up in a batch."""
        return len(self.in_flight) + len(self.ready)

    @property
    def exhausted(self) -> bool:
        """No batch will come any more: nothing is dispatched, in flight or ready."""
        return self._closed and not self.live

    def close(self) -> None:
        self._closed = True

    # ---- events of one group

    def dispatch(self, group_id: str, samples: int) -> WeightVersion:
        """Take a slot; the group counts as of the newest confirmed version until its tokens are known."""
        self.ledger.dispatch(samples)
        return self.redispatch(group_id, samples)

    def redispatch(self, group_id: str, samples: int) -> WeightVersion:
        """``dispatch`` for a group that the ledger counts as in flight already: its attempt was interrupted."""
        assert self.free > 0, f"no free slot for {group_id}: {self.held} of {self.slots} held"
        assert group_id not in self.in_flight and group_id not in self.ready, f"{group_id} is live already"
        self.in_flight[group_id] = Flight(self.confirmed, samples, self._order)
        self._order += 1
        return self.confirmed

    def restore(self, group: Group) -> None:
        """A ready group from a checkpoint, which the ledger counts as ready already; it holds a slot again."""
        self.ready[group.task.id] = (group, self._order)
        self._order += 1

    def finish(self, group: Group) -> None:
        """All siblings are complete and graded."""
        flight = self.in_flight.pop(group.task.id)
        assert len(group.trajectories) == flight.samples
        assert group.oldest >= flight.version, f"{group.task.id}: token of {group.oldest}, dispatched at {flight.version}"
        self.ready[group.task.id] = (group, flight.order)
        self.ledger.move(flight.samples, "in_flight", "ready")

    def filter(self, group_id: str) -> None:
        """The group has no learning signal; its slot is free at once."""
        self.ledger.move(self.in_flight.pop(group_id).samples, "in_flight", "filtered")

    def fail(self, group_id: str) -> None:
        """The engine or the grader failed; never a reward of 0."""
        self.ledger.move(self.in_flight.pop(group_id).samples, "in_flight", "failed")

    def abandon(self, group_id: str) -> None:
        """The group was aborted, since none of its tokens could have been trained any more."""
        self.ledger.move(self.in_flight.pop(group_id).samples, "in_flight", "stale")

    # ---- events of the learner and the engines

    def lag(self, version: WeightVersion) -> int:
        """Committed batches between a token's version and the learner, as of now."""
        return self.learner.batch - version.batch

    def is_stale(self, version: WeightVersion) -> bool:
        return self.lag(version) > self.bound

    def expire(self) -> list[Group]:
        """Take out the ready groups that can no longer be trained: nothing but stale tokens, or (drop) any beyond the bound."""
        gone = [group for group, _ in self.ready.values() if self._expired(group)]
        for group in gone:
            del self.ready[group.task.id]
            self.ledger.move(len(group.trajectories), "ready", "stale")
        return gone

    def _expired(self, group: Group) -> bool:
        if self.on_stale == "drop" and self.is_stale(group.oldest):
            return True
        return all(fully_stale(t, self.learner, self.schedule) for t in group.trajectories)

    def take(self) -> tuple[Group, ...] | None:
        """The G ready groups of smallest v0, or None while the learner has to wait.  Call ``expire`` first."""
        assert not self.training, "a batch is being trained already"
        size = min(self.groups_per_step, len(self.ready))
        if size == 0 or (size < self.groups_per_step and not (self._closed and not self.in_flight)):
            return None
        ordered = sorted(self.ready.values(), key=lambda entry: (entry[0].oldest, entry[1]))
        if self.on_stale == "wait" and not self._deadlines_hold([group.oldest for group, _ in ordered[size:]]):
            return None
        self.training = tuple(group for group, _ in ordered[:size])
        for group in self.training:
            del self.ready[group.task.id]
            self.ledger.move(len(group.trajectories), "ready", "training")
        return self.training

    def _deadlines_hold(self, remaining_ready: list[WeightVersion]) -> bool:
        """The rule of ``wait``: after this step, every remaining live group can still be trained in time.

        A group must be trained by learner version v0 + η, and a step takes G groups; so for every j ≥ −1,
        #{v0 + η ≤ L + 1 + j} ≤ (j + 1)·G.
        """
        v0s = [v.batch for v in remaining_ready] + [flight.version.batch for flight in self.in_flight.values()]
        return all(
            sum(v0 + self.bound <= self.learner.batch + 1 + j for v0 in v0s) <= (j + 1) * self.groups_per_step
            for j in range(-1, self.bound + 2)
        )

    def commit(self) -> WeightVersion:
        """The learner has trained the batch; what became of each sample is ``staleness.outcome``'s to say."""
        assert self.training, "commit without a batch"
        for trajectory in (t for group in self.training for t in group.trajectories):
            end = outcome(trajectory, fresh(trajectory, self.learner, self.schedule), filter_overlong=self.filter_overlong)
            self.ledger.move(1, "training", end)
        self.learner = self.learner.next()
        self._unconfirmed.append((self.learner, len(self.training)))
        self.training = ()
        return self.learner

    def imitated(self, samples: int) -> WeightVersion:
        """A supervised step: a commit on demonstrations, which take no slots and are never stale."""
        self.ledger.dispatch(samples)
        self.ledger.move(samples, "in_flight", "trained")
        self.learner = self.learner.next()
        return self.learner

    def confirm(self, version: WeightVersion) -> None:
        """Every engine holds ``version``: the slots of the batches up to it are free."""
        assert self.confirmed <= version <= self.learner, f"confirmed {version}, between {self.confirmed} and {self.learner}"
        self.confirmed = version
        while self._unconfirmed and self._unconfirmed[0][0] <= version:
            self._unconfirmed.popleft()

    def queue_metrics(self) -> Metrics:
        """Lag so far of what is still on its way: a batch taken now would find it this stale."""
        flights = [self.lag(flight.version) for flight in self.in_flight.values()]
        queued = [self.lag(group.oldest) for group, _ in self.ready.values()]
        return {
            "staleness/in_flight_mean": Mean(sum(flights) / max(len(flights), 1), len(flights)),
            "staleness/queued_mean": Mean(sum(queued) / max(len(queued), 1), len(queued)),
            "staleness/dropped_total": Last(self.ledger.counts["stale"]),
        }
