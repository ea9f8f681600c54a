"""Checkpoint contents, the data cursor, figures and sinks: everything of the controller that needs no process."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from slipstream.cluster import controller as controller_module
from slipstream.cluster import recovery, usage
from slipstream.cluster.actors import EngineStats, RunPlace
from slipstream.cluster.controller import Controller
from slipstream.cluster.cursor import Cursor
from slipstream.cluster.evaluation import EvalResult, score
from slipstream.cluster.faults import cause, describe
from slipstream.cluster.fixed import fixed_keys, require_same
from slipstream.cluster.fleet import Fleet, Member
from slipstream.cluster.flow import Flow
from slipstream.cluster.group_codec import decode_group, encode_group
from slipstream.cluster.idle import IdleGroups
from slipstream.cluster.launch import RunFailed, _write_ending, as_told
from slipstream.cluster.models import find_models
from slipstream.cluster.progress import line
from slipstream.cluster.publication import Publisher
from slipstream.cluster.pulse import Pulse
from slipstream.cluster.scoring import Scoring
from slipstream.cluster.staging import LOCK, staging
from slipstream.cluster.telemetry import Telemetry, summarise
from slipstream.cluster.usage import Usage
from slipstream.core.audit import audit
from slipstream.core.metrics import Histogram, Max, Mean, Metrics, values
from slipstream.core.mistakes import UserError
from slipstream.core.records import Group, Task, Trajectory, WeightVersion
from slipstream.core.rundir import RunDirectory
from slipstream.core.schema import Model, Recipe, Schedule
from slipstream.core.speculation import Speculation, TestTimeSpeculation
from slipstream.rollout import files
from slipstream.rollout.failures import GradingError
from slipstream.rollout.prompts import PromptTooLong
from slipstream.rollout.tasks import open_source
from slipstream.trainer.model import resolve_model

LEDGER = {"dispatched": 4, "in_flight": 0, "ready": 0, "training": 0, "trained": 4, "stale": 0, "filtered": 0, "failed": 0}


@pytest.fixture
def recipe() -> Recipe:
    return Recipe.model_validate(
        {"name": "trial", "model": {"path": "builtin:tiny"}, "data": {"source": "builtin:number_sorting"}}
    )


@pytest.fixture
def run(tmp_path: Path, recipe: Recipe) -> Any:
    with RunDirectory.create(tmp_path / "runs", recipe) as directory:
        yield directory


def a_group(prompt: Any) -> Group:
    old, new = WeightVersion(0, 3), WeightVersion(1, 3)
    trajectory = Trajectory(
        sample_id="train/2/7#0",
        prompt_ids=(5, 47),
        token_ids=(4, 5, 2),
        loss_mask=(True, False, True),
        behaviour_logprobs=(-0.1, 0.0, -1.0000001192092896),
        policy_versions=(old, new, new),
        kv_versions=(old, old, old),
        status="length",
        text="01\x00",
        reward=0.5,
        rewards={"exact": 1.0, "my:own": 0.0},
    )
    task = Task(
        id="train/2/7",
        epoch=2,
        position=7,
        prompt=prompt,
        answer="1",
        completion=None,
        columns={"entry": {"a": [1, 2]}},
        source="x.jsonl",
    )
    return Group(task=task, dispatched=old, trajectories=(trajectory,))


# ---- what a checkpoint holds


@pytest.mark.parametrize("prompt", ["1<", (5, 47), ({"role": "user", "content": "1<"},)])
def test_a_group_survives_the_checkpoint(prompt: Any) -> None:
    """Through JSON and back: the same tokens, log-probs to the last bit, versions, prompts of all three kinds."""
    group = a_group(prompt)
    plain = json.loads(json.dumps(encode_group(group)))
    assert decode_group(plain, lambda *place: {(2, 7): group.task}[place]) == group


def test_a_batch_is_saved_once() -> None:
    """At the end of a run whose last batch has a checkpoint, and of a resume that had nothing to do."""
    controller: Any = object.__new__(Controller)
    controller.flow, controller.cursor = Flow(Schedule(), WeightVersion(1, 9)), None
    controller.saved_batch = 9
    asyncio.run(recovery.save(controller))  # else it would ask for the recipe, the telemetry and the learner
    controller.saved_batch = 8
    with pytest.raises(AttributeError):
        asyncio.run(recovery.save(controller))


def test_a_resume_may_change_how_far_a_run_goes_and_not_what_it_learns(recipe: Recipe) -> None:
    saved = fixed_keys(recipe)
    longer = recipe.schedule.model_copy(update={"steps": 7})
    require_same(recipe.model_copy(update={"schedule": longer}), saved)
    other = recipe.model_copy(update={"seed": 1, "schedule": longer.model_copy(update={"group_size": 3})})
    with pytest.raises(ValueError, match=r"(?s)schedule.group_size: got 3, expected 8.*seed: got 1, expected 0.*start"):
        require_same(other, saved)


def test_a_run_that_shares_its_drafts_may_go_on_with_one_engine(recipe: Recipe) -> None:
    """Where it cannot share; two engines that learn otherwise could not be resumed on one."""
    tts = TestTimeSpeculation(enabled=True, share_every_s=60.0)
    speculation = Speculation(method="draft_model", draft="builtin:tiny", tts=tts)
    rollout = recipe.rollout.model_copy(update={"engines": 2, "speculation": speculation})
    saved = fixed_keys(recipe.model_copy(update={"rollout": rollout}))
    alone = speculation.model_copy(update={"tts": tts.model_copy(update={"share_every_s": None})})
    changed = rollout.model_copy(update={"engines": 1, "speculation": alone})
    require_same(recipe.model_copy(update={"rollout": changed}), saved)


@pytest.mark.parametrize("elsewhere", ["the learner", "engine 1"])
def test_a_checkpoint_lacks_no_part_that_another_node_wrote(recipe: Recipe, tmp_path: Path, elsewhere: str) -> None:
    """On a disk of its own; a resume would take the first engine's draft for the second's, without a word."""

    async def write(who: str, file: Path) -> None:
        if who != elsewhere:
            file.parent.mkdir(parents=True)
            file.write_text("{}")

    def actor(index: int) -> Any:
        return SimpleNamespace(
            save_draft=SimpleNamespace(remote=lambda folder: write(f"engine {index}", folder / "draft.json"))
        )

    speculation = Speculation(method="draft_model", draft="builtin:tiny", tts=TestTimeSpeculation(enabled=True))
    rollout = recipe.rollout.model_copy(update={"engines": 2, "speculation": speculation})
    controller: Any = object.__new__(Controller)
    controller.recipe = recipe.model_copy(update={"rollout": rollout})
    controller.flow, controller.saved_batch = Flow(Schedule(), WeightVersion(1, 9)), None
    controller.cursor = SimpleNamespace(epoch=0, position=0, skipped=0)
    controller.scoring, controller.places = SimpleNamespace(coefficient=0.0), {}
    controller.interrupted, controller.telemetry = [], SimpleNamespace(event=lambda *_, **__: None)
    controller.run_dir = SimpleNamespace(checkpoints=tmp_path)
    controller.learners = SimpleNamespace(save=lambda folder: write("the learner", Path(folder) / "learner.json"))
    members = [Member(i, actor(i), "node", WeightVersion(1, 9)) for i in range(2)]
    controller.fleet = Fleet(controller.recipe, RunPlace("r", "logs", ""), members)
    with pytest.raises(UserError, match=f"{elsewhere} wrote on another node; keep runs on a disk"):
        asyncio.run(recovery.save(controller))
    assert not list(tmp_path.glob("step*"))


@pytest.mark.parametrize("kind", ["jsonl", "folder"])
def test_a_resume_notices_that_its_rows_are_others(recipe: Recipe, tmp_path: Path, kind: str) -> None:
    """The digest is of what the process has read: here, of the file before it was replaced."""
    path = tmp_path / ("rows.jsonl" if kind == "jsonl" else "rows")

    def write(answers: str) -> None:
        rows = [{"prompt": f"{answer}<", "answer": answer} for answer in answers]
        if kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            shutil.rmtree(path, ignore_errors=True)
            Dataset.from_list(rows).save_to_disk(path)

    from datasets import Dataset

    write("234")
    of_file = recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": str(path)})})
    open_source(of_file.data, 0, "train", of_file.monitor.eval.model_copy(update={"size": 1}))
    write("235")
    saved = fixed_keys(of_file)
    require_same(of_file, saved)
    files._digest.cache_clear()  # as in another process
    for sections in ((), ("data.", "monitor.eval.")):
        with pytest.raises(UserError, match=r"data\.source: .*rows.* does not hold the rows that the run began with; put them"):
            require_same(of_file, saved, *([sections] if sections else []))
    write("234")
    if kind == "folder":
        (path / "cache-1.arrow").write_text("of a map that somebody made")
    files._digest.cache_clear()
    require_same(of_file, saved)


def test_another_end_token_is_a_change(recipe: Recipe) -> None:
    def ends(text: str) -> Recipe:
        return recipe.model_copy(update={"data": recipe.data.model_copy(update={"options": {"end_token": text}})})

    with pytest.raises(UserError, match=r"data\.options\.end_token: got b, expected a"):
        require_same(ends("b"), fixed_keys(ends("a")))


# ---- the cursor


class Source:
    def __init__(self, *prompts: str) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def task(self, epoch: int, position: int) -> Task:
        return Task(id=f"train/{epoch}/{position}", epoch=epoch, position=position, prompt=self.prompts[position])


class Encoder:
    """One token per character, five at most."""

    def encode(self, task: Task) -> tuple[int, ...]:
        if len(task.prompt) > 5:
            raise PromptTooLong(task.id, len(task.prompt), 5, "too long")
        return tuple(map(ord, task.prompt))  # type: ignore[arg-type]


def cursor(*prompts: str, epochs: int | None = None) -> Cursor:
    return Cursor(Source(*prompts), Encoder(), epochs)  # type: ignore[arg-type]


def test_the_cursor_walks_epochs_and_counts_what_it_leaves_out() -> None:
    at = cursor("a", "too long", "c", epochs=2)
    found = [entry[0].id for entry in iter(at.next, None)]
    assert found == ["train/0/0", "train/0/2", "train/1/0", "train/1/2"]
    assert at.skipped == 2 and at.next() is None and (at.epoch, at.position) == (2, 0)


def test_the_cursor_without_an_end_starts_over() -> None:
    at = cursor("a", "b")
    assert [(e[0].epoch, e[0].position) for e in (at.next() for _ in range(5)) if e] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_a_source_of_nothing_but_long_prompts_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"not one of 2 prompts fits; raise data\.max_prompt_tokens"):
        cursor("much too long", "as well too long").next()
    assert [e[0].id for e in cursor("a", "too long", "c").all()] == ["train/0/0", "train/0/2"]


# ---- figures


def test_usage_is_of_the_time_since_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines, ten seconds: busy 8 + 4 of 20 engine seconds, so idle 0.4; 300 tokens; the learner waited 2.5 s."""
    clock = iter([0.0, 100.0, 110.0])
    monkeypatch.setattr(usage.time, "perf_counter", lambda: next(clock))
    meter = Usage()
    meter.begin([EngineStats(1000, 50.0), EngineStats(0, 0.0)])
    step = values(meter.step([EngineStats(1200, 58.0), EngineStats(100, 4.0)], 2.5, 200.0))
    assert step == pytest.approx(
        {
            "idle/learner": 0.25,
            "idle/rollout": 0.4,
            "throughput/rollout_tokens_per_s": 30.0,
            "throughput/trained_tokens_per_s": 20.0,
        }
    )
    assert meter.idle() == pytest.approx({"learner": 0.25, "rollout": 0.4})
    assert meter.throughput() == pytest.approx({"rollout_tokens_per_s": 30.0, "trained_tokens_per_s": 20.0})


def step_metrics(lag_max: int, hist: dict[int, int], ratio_max: float, pause_s: float) -> Metrics:
    return {
        "staleness/token_max": Max(lag_max),
        "staleness/trained_token_max": Max(min(lag_max, 1)),
        "staleness/token_hist": Histogram(hist),
        "staleness/masked_frac": Mean(sum(n for lag, n in hist.items() if lag > 1) / sum(hist.values())),
        "staleness/kv_mean": Mean(float(lag_max)),
        "offpolicy/ratio_max": Max(ratio_max),
        "offpolicy/ess": Mean(0.5),
        "weights/pause_s": Mean(pause_s),
    }


def evaluated(step: int, value: float) -> EvalResult:
    return EvalResult(step=step, score=value, n=10, failed=0, metric="accuracy", seconds=1.0, versions={})


def summary(telemetry: Telemetry, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "status": "completed",
        "error": None,
        "steps": 3,
        "version": 3,
        "bound": 1,
        "ledger": LEDGER,
        "idle": {"learner": 0.1, "rollout": 0.2},
        "throughput": {"rollout_tokens_per_s": 1.0, "trained_tokens_per_s": 2.0},
        "start_s": 1.25,
        "publishes": 4,
        "resumes": 0,
        "draft": {},
    }
    return summarise(telemetry, **{**fields, **changes})


def test_the_summary_adds_up_the_steps_of_all_attempts(run: RunDirectory) -> None:
    """Lags over three steps: 6 tokens of lag 0, 3 of 1, 1 of 2: mean (3 + 2) / 10, one of ten over the bound of 1.

    Means are over tokens, of which the steps have 4, 4 and 2: KV lags of 1, 2 and 0 make (4 + 8 + 0) / 10.
    """
    before = Telemetry(run, "trial", [])
    before.evaluated(evaluated(0, 0.25))
    before.step(1, step_metrics(1, {0: 2, 1: 2}, 1.5, 0.010))
    before.step(2, step_metrics(2, {0: 2, 1: 1, 2: 1}, 3.0, 0.030))
    events, lines = run.read("events").records, run.read("metrics").records
    after = Telemetry(run, "trial", [], lines, [EvalResult.of(e) for e in events if e["kind"] == "eval"])
    after.step(3, step_metrics(0, {0: 2}, 1.25, 0.020))
    after.evaluated(evaluated(3, 0.75))
    found = summary(after, resumes=1)
    assert found["start_s"] == 1.25
    assert found["eval"] == {"before": 0.25, "after": 0.75, "n": 10, "metric": "accuracy"}
    assert found["staleness"]["token_mean"] == 0.5 and found["staleness"]["masked_frac"] == pytest.approx(0.1)
    assert found["staleness"]["kv_mean"] == pytest.approx(1.2)
    assert found["staleness"]["token_max"] == 2 and found["staleness"]["trained_token_max"] == 1
    assert found["offpolicy"]["ratio_max"] == 3.0 and found["offpolicy"]["ess_mean"] == 0.5
    assert found["weights"]["pause_s_p50"] == 0.02 and found["weights"]["publishes"] == 4
    assert found["ledger"] == {**LEDGER, "duplicates": 0} and found["faults"]["learner_restarts"] == 1
    assert [line["step"] for line in run.read("metrics").records] == [1, 2, 3]


def test_a_sink_that_fails_is_counted_and_stops_nothing(run: RunDirectory) -> None:
    class Broken:
        def write(self, step: int, metrics: Mapping[str, Any]) -> None:
            raise OSError("no route to the tracker")

        def close(self) -> None:
            pass

    telemetry = Telemetry(run, "trial", [])
    telemetry._sinks.insert(0, Broken())
    telemetry.step(1, {"reward/mean": Mean(1.0)})
    telemetry.step(2, {"reward/mean": Mean(0.5)})
    assert [m["reward/mean"] for m in run.read("metrics").records] == [1.0, 0.5], "the sinks behind it still get everything"
    assert telemetry.sink_failures == 2 and summary(telemetry)["faults"]["sink_failures"] == 2


def test_an_infinite_figure_does_not_cost_the_summary(run: RunDirectory) -> None:
    telemetry = Telemetry(run, "trial", [])
    telemetry.step(1, step_metrics(0, {0: 1}, float("inf"), 0.01))
    run.write_summary(summary(telemetry))
    assert json.loads(run.summary_file.read_text())["offpolicy"]["ratio_max"] is None


def test_a_reference_that_cannot_be_refreshed_is_refused_at_the_start(tmp_path: Path) -> None:
    policy = resolve_model(Model(path="builtin:tiny"), 0, tmp_path)
    other = tmp_path / "other"
    shutil.copytree(policy, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))

    def recipe(reference: Path, **kl: Any) -> Recipe:
        return Recipe.model_validate(
            {
                "name": "trial",
                "model": {"path": str(policy), "reference": str(reference)},
                "data": {"source": "builtin:number_sorting"},
                "algo": {"kl": {"coefficient": 0.1, **kl}},
            }
        )

    with pytest.raises(ValueError, match=r"algo\.kl\.refresh_every: .*intermediate_size is 512 in .*, and 256 in .*other"):
        find_models(recipe(other, refresh_every=5))
    turned = {**config, "rope_parameters": {**config["rope_parameters"], "rope_theta": 500.0}}
    (other / "config.json").write_text(json.dumps(turned))
    with pytest.raises(ValueError, match=r"algo\.kl\.refresh_every: .*rope_parameters is .*, and .*500\.0.* in .*other"):
        find_models(recipe(other, refresh_every=5))  # its tensors have the policy's shapes, and mean something else
    assert find_models(recipe(other)).reference == other, "as a reference that stays it will do"
    assert find_models(recipe(policy, refresh_every=5)).reference == policy
    assert find_models(recipe(tmp_path / "moved away"), resume=True).reference is None, "a checkpoint has it"


def test_a_reference_of_another_vocabulary_is_refused_at_the_start(tmp_path: Path) -> None:
    """Its log-probs would be those of other tokens: a KL that looks like any other."""
    policy = resolve_model(Model(path="builtin:tiny"), 0, tmp_path)
    swapped = shutil.copytree(policy, tmp_path / "swapped")
    tokenizer = json.loads((swapped / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer))
    recipe = Recipe.model_validate(
        {
            "name": "trial",
            "model": {"path": str(policy), "reference": str(swapped)},
            "data": {"source": "builtin:number_sorting"},
            "algo": {"kl": {"coefficient": 0.1}},
        }
    )
    with pytest.raises(ValueError, match=r"model\.reference: .* differs from the policy's .* in 2 tokens: 'a' is 15, not 14"):
        find_models(recipe)


def answer(reward: float) -> Trajectory:
    return Trajectory(
        sample_id="s",
        prompt_ids=(5,),
        token_ids=(2,),
        loss_mask=(True,),
        behaviour_logprobs=(-0.5,),
        policy_versions=(WeightVersion(0, 4),),
        kv_versions=(WeightVersion(0, 4),),
        status="eos",
        reward=reward,
    )


def test_the_score_is_the_mean_over_what_could_be_graded() -> None:
    result = score([answer(1.0), answer(0.0), answer(0.0), answer(1.0)], step=4, failed=2, seconds=1.0)
    assert (result.score, result.n, result.failed, result.metric) == (0.5, 4, 2, "accuracy")
    assert result.versions == {"0.4": 4}
    assert score([answer(0.5)], 0, 0, 1.0).metric == "reward"
    assert score([], 0, 3, 1.0).score == 0.0


# ---- what goes on around the training


def test_the_plain_line(recipe: Recipe) -> None:
    snapshot = {
        "stage": "training",
        "step": 40,
        "metrics": {"reward/mean": 0.7123, "staleness/token_mean": 1.234, "throughput/rollout_tokens_per_s": 1234.5},
        "evaluations": [evaluated(20, 0.625).as_dict()],
    }
    shown = line(snapshot, recipe)
    assert shown == "training 40/100 · reward 0.712 · lag 1.23 · tok/s 1234 · held-out accuracy 0.625 (step 20)"


def test_a_publication_that_fails_in_the_background_fails_the_run_at_once(run: RunDirectory, recipe: Recipe) -> None:
    """The learner waits for groups, which wait for slots, which wait for this publication: nobody would ever ask for it."""

    class Torn:
        def export(self) -> None:
            pass

        async def send(self, version: WeightVersion, exported: None) -> Any:
            raise ValueError("weight bucket 3: the transfer is torn")

    async def story() -> None:
        publisher = Publisher(Torn(), None, Telemetry(run, "trial", []), None)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as loops:
            await publisher.start(WeightVersion(0, 1), loops)
            await Pulse().until(lambda: None)

    with pytest.raises(ExceptionGroup) as failure:
        asyncio.run(asyncio.wait_for(story(), 5.0))
    assert describe(failure.value) == "ValueError: weight bucket 3: the transfer is torn"


def test_the_cause_is_told_and_not_its_wrappings() -> None:
    inner = ValueError("the reason")
    outer = BaseExceptionGroup("b", [inner])
    outer.add_note("while it was late")
    group = BaseExceptionGroup("a", [outer, KeyError("later")])
    assert cause(group) is inner and describe(group) == "ValueError: the reason (while it was late)"


@pytest.mark.parametrize(
    ("problem", "kind", "told", "traced"),
    [
        (UserError("data.source: got x"), UserError, "data.source: got x", False),
        (RunFailed("an engine's process 7 died"), RunFailed, "an engine's process 7 died", False),
        (ValueError("zip() argument 2 is shorter"), RunFailed, "ValueError: zip() argument 2 is shorter", True),
    ],
)
def test_only_a_users_mistake_is_told_as_one(
    problem: Exception, kind: type[Exception], told: str, traced: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = ray.exceptions.RayTaskError("run", "the remote traceback", problem)
    ended = as_told(failure)
    assert type(ended) is kind and str(ended) == told
    assert ("the remote traceback" in capsys.readouterr().err) == traced


def test_a_failed_group_is_counted_by_its_reason(run: RunDirectory, recipe: Recipe) -> None:
    """Through Ray the failure comes as an exception of two classes whose text is a remote traceback."""
    told = GradingError("scores:faulty/raised", "RuntimeError: no opinion on 1")
    remote = ray.exceptions.RayTaskError("sample", "\x1b[36mray::RolloutActor.sample()\x1b[39m\nTraceback …", told)

    class Failing:
        def pick(self, version: WeightVersion) -> None:
            return None

        async def sample(self, *_: Any) -> Group:
            raise remote.as_instanceof_cause()

    controller: Any = object.__new__(Controller)
    controller.recipe, controller.fleet, controller.pulse = recipe, Failing(), Pulse()
    controller.flow, controller.telemetry = Flow(recipe.schedule, WeightVersion(0, 0)), Telemetry(run, "trial", [])
    controller.places, controller._idle = {"train/2/7": (2, 7)}, IdleGroups(9)
    task = a_group("1<").task
    asyncio.run(controller._group(task, (5, 47), controller.flow.dispatch(task.id, 8)))
    (event,) = run.read("events").records
    assert (event["kind"], event["reason"]) == ("failed", "scores:faulty/raised")
    assert event["detail"] == "RuntimeError: no opinion on 1"


def test_a_batch_is_assembled_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    """A second for a million tokens, in which no group could arrive and no health be checked."""
    threads: list[threading.Thread] = []

    def recorded(groups: Any, version: WeightVersion, recipe: Recipe, context: int, *_: Any) -> None:
        assert context == 77
        threads.append(threading.current_thread())
        raise KeyboardInterrupt

    monkeypatch.setattr(controller_module, "assemble", recorded)
    controller: Any = object.__new__(Controller)
    controller.recipe, controller.pulse, controller._stopping = recipe, Pulse(), False
    controller.parts = SimpleNamespace(context=77)
    controller.scoring = Scoring(recipe, None, None)  # type: ignore[arg-type]
    controller.flow = Flow(Schedule(groups_per_step=1, group_size=1), WeightVersion(0, 3))
    controller.flow.dispatch("train/2/7", 1)
    controller.flow.finish(a_group("1<"))
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(controller._learn())
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_the_end_that_a_dead_controller_could_not_write(run: RunDirectory) -> None:
    run.append("events", {"time": 0.0, "kind": "start", "attempt": 0, "bound": 1, "groups_per_step": 1})
    run.append("events", {"time": 0.0, "kind": "dispatch", "group_id": "g", "version": "0.0", "samples": 2})
    run.close()
    _write_ending(
        run.path, "failed", "the controller's process 7 died", {"step": 0, "wall_s": 3.0, "ledger": {"dispatched": 0}}
    )
    written = json.loads(run.summary_file.read_text())
    assert (written["status"], written["error"]) == ("failed", "the controller's process 7 died")
    assert run.read("events").records[-1]["kind"] == "end"
    report = audit(run.path)  # the last snapshot of the ledger was older than the events, so it is not written
    assert report.ok and report.figures["ledger"]["live"] == 2, report.problems


def test_shared_memory_is_cleaned_for_dead_runs_only(tmp_path: Path) -> None:
    def left(name: str, *, locked: bool) -> int | None:
        (tmp_path / name / "0.1").mkdir(parents=True)
        handle = os.open(tmp_path / name / LOCK, os.O_RDWR | os.O_CREAT)
        if locked:
            fcntl.flock(handle, fcntl.LOCK_EX)
            return handle
        os.close(handle)
        return None

    left("slipstream-killed-1", locked=False)
    handle = left("slipstream-running-2", locked=True)
    (tmp_path / "slipstream-of-an-engine-node").mkdir()
    (tmp_path / "other").mkdir()
    with staging("mine-3", tmp_path) as folder:
        assert folder == tmp_path / "slipstream-mine-3"
        (folder / "0.5").mkdir()
        names: Sequence[str] = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["other", "slipstream-mine-3", "slipstream-of-an-engine-node", "slipstream-running-2"]
    assert not folder.exists()
    assert handle is not None
    os.close(handle)
