"""The bound, the ledger and freedom from deadlock, over stragglers, late confirmation, failures and the end of the data."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.cluster.flow import Flow
from slipstream.cluster.ledger import Ledger
from slipstream.core.records import Group, Task, Trajectory, WeightVersion
from slipstream.core.schema import Schedule

SIBLINGS = 2


def group(name: str, dispatched: WeightVersion, *versions: list[WeightVersion]) -> Group:
    """A group whose trajectories carry the given per-token versions."""
    return Group(
        task=Task(id=name, epoch=0, position=0, prompt="x"),
        dispatched=dispatched,
        trajectories=tuple(
            Trajectory(
                sample_id=f"{name}#{i}",
                prompt_ids=(1,),
                token_ids=(4,) * len(tokens),
                loss_mask=(True,) * len(tokens),
                behaviour_logprobs=(-0.5,) * len(tokens),
                policy_versions=tuple(tokens),
                kv_versions=tuple(tokens),
                status="eos",
            )
            for i, tokens in enumerate(versions)
        ),
    )


def schedule(bound: int, per_step: int, on_stale: str = "mask") -> Schedule:
    return Schedule(max_staleness=bound, groups_per_step=per_step, group_size=SIBLINGS, on_stale=on_stale)


class FlowMachine(RuleBasedStateMachine):
    """Any order of events that real engines and a real learner can produce."""

    @initialize(bound=st.integers(0, 4), per_step=st.integers(1, 3), on_stale=st.sampled_from(["mask", "wait", "drop"]))
    def start(self, bound: int, per_step: int, on_stale: str) -> None:
        self.flow = Flow(schedule(bound, per_step, on_stale), WeightVersion(0, 0))
        self.names = 0
        self.last_batch_was_short = False

    @rule()
    @precondition(lambda self: self.flow.free)
    def dispatch_all(self) -> None:
        while self.flow.free:
            version = self.flow.dispatch(f"g{self.names}", SIBLINGS)
            assert version == self.flow.confirmed
            self.names += 1

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.flow.in_flight)))

    @rule(data=st.data())
    @precondition(lambda self: self.flow.in_flight)
    def finish(self, data: st.DataObject) -> None:
        """The tokens may be of any version between dispatch and the newest that some engine may hold."""
        name = self.pick(data)
        dispatched = self.flow.in_flight[name].version
        batches = st.lists(st.integers(dispatched.batch, self.flow.learner.batch), min_size=1, max_size=3)
        tokens = [[WeightVersion(0, b) for b in sorted(data.draw(batches))] for _ in range(SIBLINGS)]
        self.flow.finish(group(name, dispatched, *tokens))

    @rule(data=st.data(), how=st.sampled_from(["filter", "fail", "abandon"]))
    @precondition(lambda self: self.flow.in_flight)
    def lose(self, data: st.DataObject, how: str) -> None:
        getattr(self.flow, how)(self.pick(data))

    @rule()
    def step(self) -> None:
        self.train_one()

    def train_one(self) -> bool:
        """One step of the learner; checks the bound on what it trains."""
        assert not self.last_batch_was_short or not self.flow.in_flight
        self.flow.expire()
        batch = self.flow.take()
        if batch is None:
            return False
        self.last_batch_was_short = len(batch) < self.flow.groups_per_step
        if self.flow.on_stale in ("wait", "drop"):
            assert all(self.flow.lag(g.oldest) <= self.flow.bound for g in batch), "a group beyond the bound was taken"
        else:
            assert all(any(not self.flow.is_stale(v) for t in g.trajectories for v in t.policy_versions) for g in batch)
        self.flow.commit()
        return True

    @rule(data=st.data())
    @precondition(lambda self: self.flow.confirmed < self.flow.learner)
    def confirm(self, data: st.DataObject) -> None:
        batch = data.draw(st.integers(self.flow.confirmed.batch + 1, self.flow.learner.batch))
        self.flow.confirm(WeightVersion(0, batch))

    @rule()
    def epoch_ends(self) -> None:
        self.flow.close()

    @invariant()
    def ledger_balances(self) -> None:
        if hasattr(self, "flow"):
            self.flow.ledger.check()
            assert 0 <= self.flow.held <= self.flow.slots
            assert self.flow.learner.batch - self.flow.confirmed.batch <= self.flow.bound + 1, (
                "published too late for the slots"
            )

    def teardown(self) -> None:
        """No deadlock: once every group in flight has finished and every version is confirmed, the learner can go on."""
        if not hasattr(self, "flow"):
            return
        flow = self.flow
        for _ in range(3 * flow.slots):
            for name, flight in sorted(flow.in_flight.items()):
                flow.finish(group(name, flight.version, *[[flight.version]] * SIBLINGS))
            if flow.confirmed < flow.learner:
                flow.confirm(flow.learner)
            if not self.train_one():
                if flow._closed:
                    assert not flow.ready and not flow.in_flight, "closed with groups left over"
                    return
                assert flow.free, "the learner waits, nothing is in flight, and no slot is free: deadlock"
                self.dispatch_all()
        assert flow.learner.batch > 0


FlowMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
TestFlow = FlowMachine.TestCase


def test_synchronous_is_a_bound_of_zero() -> None:
    """η = 0, G = 2: two slots; the learner trains what version n wrote, and nothing is dispatched before n + 1 is confirmed."""
    flow = Flow(schedule(0, 2), WeightVersion(0, 0))
    for name in "ab":
        flow.dispatch(name, SIBLINGS)
    assert flow.free == 0
    for name in "ab":
        flow.finish(group(name, WeightVersion(0, 0), [WeightVersion(0, 0)], [WeightVersion(0, 0)]))
    assert [g.task.id for g in flow.take() or ()] == ["a", "b"]
    assert flow.commit() == WeightVersion(0, 1)
    assert flow.free == 0, "slots are held until the new version is confirmed"
    flow.confirm(WeightVersion(0, 1))
    assert flow.free == 2
    assert flow.dispatch("c", SIBLINGS) == WeightVersion(0, 1)


def test_smallest_v0_first() -> None:
    flow = Flow(schedule(1, 1), WeightVersion(0, 0))
    flow.dispatch("old", SIBLINGS)
    flow.dispatch("a", SIBLINGS)
    flow.finish(group("a", WeightVersion(0, 0), [WeightVersion(0, 0)], [WeightVersion(0, 0)]))
    flow.take()
    flow.commit()
    flow.confirm(WeightVersion(0, 1))
    flow.dispatch("new", SIBLINGS)
    flow.finish(group("new", WeightVersion(0, 1), [WeightVersion(0, 1)], [WeightVersion(0, 1)]))
    flow.finish(group("old", WeightVersion(0, 0), [WeightVersion(0, 0)], [WeightVersion(0, 1)]))
    assert [g.task.id for g in flow.take() or ()] == ["old"]


@pytest.mark.parametrize(("on_stale", "outcome"), [("drop", "dropped"), ("mask", "taken")])
def test_a_group_with_one_stale_token(on_stale: str, outcome: str) -> None:
    """η = 0, learner at 1: tokens of 0.0 are stale, tokens of 0.1 are fresh.  Only `drop` gives up the whole group."""
    flow = Flow(schedule(0, 1, on_stale), WeightVersion(0, 0))
    flow.learner = WeightVersion(0, 1)
    flow.dispatch("a", SIBLINGS)
    flow.finish(group("a", WeightVersion(0, 0), [WeightVersion(0, 0), WeightVersion(0, 1)], [WeightVersion(0, 0)]))
    gone = flow.expire()
    assert ("dropped" if gone else "taken") == outcome
    if outcome == "taken":
        flow.take()
        flow.commit()
        # The second sibling held nothing but a stale token: it counts as stale, the first as trained.
        assert flow.ledger.counts["stale"] == 1 and flow.ledger.counts["trained"] == 1
    else:
        assert flow.ledger.counts["stale"] == 2 and flow.free == 1


def test_a_group_whose_kv_entries_are_all_too_old_is_stale_in_the_buffer() -> None:
    """η = 0, learner at 1: the tokens are fresh, but were written on entries of 0.0, which lag by 1."""
    old, new = WeightVersion(0, 0), WeightVersion(0, 1)
    arrived = group("a", old, [new], [new])
    arrived = replace(arrived, trajectories=tuple(replace(t, kv_versions=(old,)) for t in arrived.trajectories))
    for max_kv_lag, stale in ((None, 0), (1, 0), (0, 2)):
        flow = Flow(schedule(0, 1).model_copy(update={"max_kv_lag": max_kv_lag}), old)
        flow.learner = new
        flow.dispatch("a", SIBLINGS)
        flow.finish(arrived)
        flow.expire()
        assert flow.ledger.counts["stale"] == stale, max_kv_lag


def test_wait_holds_the_learner_for_a_straggler() -> None:
    """η = 1, G = 1.  A straggler of v0 = 0 must be trained by version 1, so at L = 1 the learner waits for it."""
    flow = Flow(schedule(1, 1, "wait"), WeightVersion(0, 0))
    flow.dispatch("straggler", SIBLINGS)
    flow.dispatch("a", SIBLINGS)
    flow.finish(group("a", WeightVersion(0, 0), [WeightVersion(0, 0)], [WeightVersion(0, 0)]))
    assert flow.take() is not None
    flow.commit()
    flow.confirm(WeightVersion(0, 1))
    flow.dispatch("b", SIBLINGS)
    flow.finish(group("b", WeightVersion(0, 1), [WeightVersion(0, 1)], [WeightVersion(0, 1)]))
    assert flow.take() is None, "training b now would leave the straggler beyond the bound"
    flow.finish(group("straggler", WeightVersion(0, 0), [WeightVersion(0, 0)], [WeightVersion(0, 0)]))
    assert [g.task.id for g in flow.take() or ()] == ["straggler"]


def test_the_ledger_refuses_what_does_not_balance() -> None:
    ledger = Ledger()
    ledger.dispatch(3)
    with pytest.raises(AssertionError, match="4 samples leave 'in_flight'"):
        ledger.move(4, "in_flight", "ready")
    with pytest.raises(ValueError, match="does not balance"):
        Ledger.restore({**ledger.as_dict(), "trained": 1})
    assert Ledger.restore(ledger.as_dict()).as_dict() == ledger.as_dict()


def test_overlong_samples_are_filtered_at_the_commit_and_stale_ones_stay_stale() -> None:
    """η = 0, learner at 1.  Both responses of ``a`` were cut off, the second is stale besides; those of ``b`` are whole."""
    new, old = WeightVersion(0, 1), WeightVersion(0, 0)
    flow = Flow(schedule(0, 2), old, filter_overlong=True)
    flow.learner = new
    cut, whole = group("a", old, [new], [old]), group("b", old, [new], [new])
    cut = replace(cut, trajectories=tuple(replace(t, status="length") for t in cut.trajectories))
    for arrived in (cut, whole):
        flow.dispatch(arrived.task.id, SIBLINGS)
        flow.finish(arrived)
    assert flow.take() is not None
    flow.commit()
    assert {state: n for state, n in flow.ledger.counts.items() if n} == {"filtered": 1, "stale": 1, "trained": 2}
