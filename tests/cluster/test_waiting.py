"""No wait without an end, and none that ends without saying who was waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.cluster import fleet as fleet_module
from slipstream.cluster import pulse as pulse_module
from slipstream.cluster.actors import RunPlace
from slipstream.cluster.draft_run import _responses
from slipstream.cluster.evaluate_run import _evaluate
from slipstream.cluster.evaluation import Evaluator
from slipstream.cluster.fleet import Fleet, Member
from slipstream.cluster.flow import Flow
from slipstream.cluster.learners import LearnerGroup
from slipstream.cluster.pulse import Pulse
from slipstream.cluster.telemetry import Telemetry
from slipstream.cluster.transport import Mapped, Nccl, PlainIpc
from slipstream.cluster.waiting import alarm, within
from slipstream.core.records import Group, Task, Trajectory, WeightVersion
from slipstream.core.rundir import RunDirectory
from slipstream.core.schema import Recipe
from slipstream.rollout.environment import Completion

PLACE = RunPlace("trial", "logs", ".")
OLD, NEW = WeightVersion(0, 2), WeightVersion(0, 3)


class Mute:
    """An actor that answers the methods in ``answers`` and no others."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        answers = self._answers

        class Method:
            def remote(self, *arguments: Any) -> asyncio.Future[Any]:
                answer = asyncio.get_running_loop().create_future()
                if name in answers:
                    answer.set_result(answers[name])
                return answer

        return Method()


class Reply:
    """What an engine says of a commit, and of itself."""

    pause_s = 0.1
    sampled_tokens = 0


def ends(engines: list[Mute], rank: Mute, **limits: float) -> tuple[Fleet, LearnerGroup]:
    recipe = Recipe.model_validate(
        {
            "name": "trial",
            "model": {"path": "builtin:tiny"},
            "data": {"source": "builtin:number_sorting"},
            "cluster": {"step_timeout_s": 0.25, **limits},
        }
    )
    members = [Member(i, engine, f"node-{i}", OLD) for i, engine in enumerate(engines)]
    return Fleet(recipe, PLACE, members, engines), LearnerGroup(recipe, PLACE, [rank])


async def answer(value: str, after_s: float) -> str:
    await asyncio.sleep(after_s)
    return value


def test_a_wait_ends_with_who_what_and_the_key_of_the_limit() -> None:
    assert asyncio.run(within(5.0, "engine 1: x", answer("here", 0.0))) == "here"
    with pytest.raises(TimeoutError) as late:
        asyncio.run(within(0.01, "engine 1: commit of 0.3", answer("late", 5.0)))
    assert str(late.value) == "engine 1: commit of 0.3 took longer than cluster.step_timeout_s = 0.01 s"
    with pytest.raises(TimeoutError) as fixed:
        asyncio.run(within(0.01, "engine 1: x", answer("late", 5.0), key=None))
    assert str(fixed.value) == "engine 1: x took longer than 0.01 s"


def test_what_the_call_raises_passes_as_it_is() -> None:
    async def fails(problem: Exception) -> None:
        raise problem

    for problem in (TimeoutError("the grader gave up"), StopAsyncIteration(), ValueError("mine")):
        with pytest.raises(type(problem)) as raised:
            asyncio.run(within(5.0, "engine 1: x", fails(problem)))
        assert raised.value is problem


def test_an_alarm_interrupts_what_blocks_the_thread() -> None:
    started = time.monotonic()
    told = "engine: its start took longer than cluster.start_timeout_s = 0.25 s"
    with pytest.raises(TimeoutError, match=told), alarm(0.25, "engine: its start", "cluster.start_timeout_s"):
        time.sleep(20.0)
    assert time.monotonic() - started < 10.0
    with alarm(0.25, "engine: its start", "cluster.start_timeout_s"):
        pass
    time.sleep(0.5)  # it rings no more


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda fleet: fleet.commit(NEW, lambda m: {}), "engine 1: commit of 0.3"),
        (lambda fleet: fleet.stats(), "engine 1: reading its counters"),
        (lambda fleet: fleet.sampled_tokens(), "engine 1: reading its counters"),
        (lambda fleet: fleet.abort_before(OLD, ["a"]), "engine 1: calling groups off"),
        (lambda fleet: fleet.save_drafts(Path("drafts")), "engine 1: saving its draft"),
        (lambda fleet: fleet.share_drafts(), "engine 1: sharing its draft"),
        (lambda fleet: fleet.check_health(), "engine 1: answering a health check"),
    ],
)
def test_an_engine_that_does_not_answer_is_named(
    call: Callable[[Fleet], Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = ("stats", "abort_before", "save_draft", "lend_draft", "average_drafts", "adopt_draft", "check_health")
    monkeypatch.setattr(fleet_module, "HEALTH_S", 0.25)

    async def story() -> None:
        fleet, _ = ends([Mute(commit=Reply(), **dict.fromkeys(methods)), Mute()], Mute())
        await asyncio.wait_for(call(fleet), 5.0)

    with pytest.raises(TimeoutError, match=rf"^{told} took longer than (cluster\.step_timeout_s = )?0\.25 s$"):
        asyncio.run(story())


class Bucket:
    nbytes = 8


async def two_buckets() -> AsyncIterator[Any]:
    for _ in range(2):
        yield answer((Bucket(), b"", 0), 0.0)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "engine", "exported", "told"),
    [
        (Mapped, {"stats": Reply()}, lambda: [two_buckets()], "engine 0: staging 0.3"),
        (Mapped, {"stats": Reply(), "stage": None}, lambda: [two_buckets()], "engine 0: completing 0.3"),
        (Mapped, {"stats": Reply()}, lambda: [endless()], "learner: the next bucket of weights"),
        (Nccl, {}, lambda: [answer("", 0.0)], "engine 0: commit of 0.3"),
        (Nccl, {"commit": Reply()}, lambda: [answer("", 5.0)], "learner: broadcast of 0.3"),
        (PlainIpc, {}, lambda: [answer("", 5.0)], "learner: export of 0.3"),
        (PlainIpc, {}, lambda: [answer("", 0.0)], "engine 0: commit of 0.3"),
    ],
)
def test_a_transport_names_the_end_that_does_not_answer(
    kind: type[Any], engine: dict[str, Any], exported: Callable[[], Any], told: str
) -> None:
    async def story() -> None:
        transport = kind(*ends([Mute(**engine)], Mute()))
        transport.specs = []
        await asyncio.wait_for(transport.send(NEW, exported()), 5.0)

    with pytest.raises(TimeoutError, match=rf"^{told} took longer than cluster\.step_timeout_s = 0\.25 s$"):
        asyncio.run(story())


async def endless() -> AsyncIterator[Any]:
    await asyncio.sleep(5.0)
    yield None


def test_an_evaluation_of_a_checkpoint_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is well and answers one task of two: after the limit the evaluation ends, whoever waits for it."""
    monkeypatch.setattr(pulse_module, "WATCH_S", 0.02)
    tasks = [(Task(id=str(i), epoch=0, position=i, prompt="1<"), (5, 47)) for i in range(2)]

    class OneAnswer(Fleet):
        async def start(self, *_: Any) -> None:
            pass

        async def stop(self) -> None:
            self.members.clear()

        async def sample(self, member: Member, task: Task, *_: Any) -> Group:
            if task.position:
                await asyncio.sleep(60.0)
            trajectory = Trajectory(
                sample_id=task.id, prompt_ids=(5, 47), token_ids=(), loss_mask=(), behaviour_logprobs=(), policy_versions=(),
                kv_versions=(), status="eos",
            )  # fmt: skip
            return Group(task=task, dispatched=OLD, trajectories=(trajectory,))

    said: list[str] = []

    async def story(run: RunDirectory) -> None:
        known, _ = ends([Mute(check_health=None)], Mute(), stall_timeout_s=0.3)
        fleet = OneAnswer(known.recipe, PLACE, known.members)
        telemetry, pulse = Telemetry(run, "trial", ()), Pulse()
        flow = Flow(known.recipe.schedule, OLD)
        evaluator = Evaluator(known.recipe.monitor.eval, tasks, fleet, flow, telemetry, pulse.beat)
        try:
            evaluation = _evaluate(fleet, evaluator, pulse, tmp_path, OLD, tasks, telemetry, (), said.append)
            await asyncio.wait_for(evaluation, 20.0)
        finally:
            assert not fleet.members, "the engines are stopped"

    told = r"nothing has moved for \d+ s \(cluster.stall_timeout_s = 0.3\): evaluating a checkpoint"
    known, _ = ends([], Mute())
    with RunDirectory.create(tmp_path, known.recipe) as run, pytest.raises(TimeoutError, match=told):
        asyncio.run(story(run))
    assert said[-1] == f"sampling {len(tasks)} answers"


def test_a_draft_does_not_wait_for_ever_for_its_samples() -> None:
    class OneResponse:
        async def sample(self, prompt_ids: tuple[int, ...], *, request_id: str) -> Completion:
            if request_id != "draft-0":
                await asyncio.sleep(60.0)
            return Completion(token_ids=(4,), logprobs=(-0.1,), versions=(OLD,), kv_versions=(OLD,), finish="eos")

    seen: list[int] = []

    async def story() -> None:
        engine: Any = OneResponse()
        progress: Any = lambda stage, done, total, loss: seen.append(done)  # noqa: E731
        await asyncio.wait_for(_responses(engine, [(5,), (6,), (7,)], 0.2, progress), 20.0)

    with pytest.raises(TimeoutError, match=r"engine: response 2 of 3 took longer than cluster\.stall_timeout_s = 0\.2 s"):
        asyncio.run(story())
    assert seen == [1]
