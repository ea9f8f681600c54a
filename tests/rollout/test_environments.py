"""The other side of an episode: what is an observation, what fails a group, what is refused at the start."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.records import Status, Task, WeightVersion
from slipstream.core.schema import Environment as Settings
from slipstream.rollout import environments as module
from slipstream.rollout.environment import Completion, NoAnswer
from slipstream.rollout.environments import Environments, score
from slipstream.rollout.failures import EnvironmentFailed

MINE = """
import asyncio, sys, threading, time
import numpy as np
from slipstream.rollout.environment import Environment, ToolError

release = threading.Event()
common = {}

class Mine(Environment):
    def __init__(self, task, *, wait_s=0.0):
        super().__init__(task)
        if task.answer == "unplayable":
            raise KeyError("no such level")
        if task.answer == "no tool":
            raise ToolError("in the wrong place")
        scores = {"nan": float("nan"), "text": "much", "beyond": 10**400, "numpy": np.float32(0.5), "bool": True}
        self.wait_s, self.score = wait_s, scores.get(task.answer)

    async def observe(self, completion):
        text = completion.text
        if text == "tool":
            raise ToolError("no such tool")
        if text == "sleep":
            await asyncio.sleep(60)
        if text == "together":
            await common[asyncio.get_running_loop()]
        if text == "own timeout":
            raise TimeoutError("of a socket")
        if text == "raise":
            raise KeyError(text)
        return {"end": None, "ids": (5, 6), "list": [5, 6], "mixed": (5, "6"), "number": 7}.get(text, f"you said {text}")

class Blocking(Mine):
    def observe(self, completion):
        if completion.text == "hang":
            release.wait(60)
        if completion.text == "tool":
            raise ToolError("no such tool")
        if completion.text == "exit":
            sys.exit(3)
        if completion.text == "cancelled":
            raise asyncio.CancelledError
        return threading.current_thread() is not threading.main_thread() and "elsewhere"

class Unscored(Mine):
    @property
    def score(self):
        raise ToolError("no judge") if self.task.answer == "no tool here" else LookupError("nobody kept it")

    @score.setter
    def score(self, value):
        pass

class Other:
    pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("beside")
    (path / "my_environments_of_the_test.py").write_text(MINE)
    return path


def task(answer: str | None = None) -> Task:
    return Task(id="train/0/0", epoch=0, position=0, prompt="1-7?", answer=answer)


def said(text: str, finish: Status = "eos") -> Completion:
    version = (WeightVersion(0, 0),)
    return Completion(token_ids=(2,), logprobs=(-0.1,), versions=version, kv_versions=version, finish=finish, text=text)


def mine(folder: Path, name: str = "Mine", **settings: Any) -> Environments:
    return Environments(Settings(name=f"my_environments_of_the_test:{name}", **settings), folder)


def observe(environments: Environments, text: str) -> Any:
    async def ask() -> Any:
        return await environments.observe(environments.open(task()), said(text))

    return asyncio.run(ask())


def test_text_ids_and_the_end_are_answers(folder: Path) -> None:
    environments = mine(folder, options={"wait_s": 0.5})
    assert observe(environments, "hello") == "you said hello"
    assert observe(environments, "ids") == (5, 6)
    assert observe(environments, "end") is None


@pytest.mark.parametrize("name", ["Mine", "Blocking"])
def test_what_a_tool_gets_wrong_is_what_the_policy_reads(folder: Path, name: str) -> None:
    assert observe(mine(folder, name), "tool") == "error: no such tool"


def test_a_tool_that_hangs_ends_the_episode_and_holds_up_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that blocks its thread, which nobody can end: but of those there may be no more than ``MOST_HUNG``."""
    with pytest.raises(NoAnswer, match=r"no answer within 0\.05 s"):
        observe(mine(folder, timeout_s=0.05), "sleep")
    monkeypatch.setattr(module, "MOST_HUNG", 2)
    blocking = mine(folder, "Blocking", timeout_s=1.0)  # those that answer have to, on a busy machine too
    with pytest.raises(NoAnswer):
        observe(blocking, "hang")
    assert observe(blocking, "hello") == "elsewhere"
    with pytest.raises(NoAnswer):
        observe(blocking, "hang")
    with pytest.raises(EnvironmentFailed, match="environment/hung: 2 calls have not come back"):
        observe(blocking, "hello")
    __import__("my_environments_of_the_test").release.set()
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.main_thread():
            thread.join(5)
    assert observe(blocking, "hello") == "elsewhere"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "environment/raised"),
        ("own timeout", "environment/raised"),
        ("list", "environment/wrong_result"),
        ("mixed", "environment/wrong_result"),
        ("number", "environment/wrong_result"),
    ],
)
def test_what_an_environment_gets_wrong_fails_the_group_with_a_reason(folder: Path, text: str, reason: str) -> None:
    with pytest.raises(EnvironmentFailed) as caught:
        observe(mine(folder), text)
    assert caught.value.reason == reason


def test_an_environment_that_cannot_be_made_or_scored_fails_the_group(folder: Path) -> None:
    environments = mine(folder)
    with pytest.raises(EnvironmentFailed, match="environment/raised: KeyError: 'no such level'"):
        environments.open(task("unplayable"))
    assert score(environments.open(task())) == {}
    assert score(environments.open(task("numpy"))) == {"environment": 0.5}
    assert score(environments.open(task("bool"))) == {"environment": 1.0}
    with pytest.raises(EnvironmentFailed, match="environment/raised: OverflowError"):
        score(environments.open(task("beyond")))
    for answer in ("nan", "text"):
        with pytest.raises(EnvironmentFailed, match="environment/wrong_score"):
            score(environments.open(task(answer)))


def test_only_a_turn_is_answered_by_a_tool_error(folder: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="environment/raised: ToolError: in the wrong place"):
        mine(folder).open(task("no tool"))
    with pytest.raises(EnvironmentFailed, match="environment/raised: ToolError: no judge"):
        score(mine(folder, "Unscored").open(task("no tool here")))


def test_a_cancellation_that_nobody_asked_for_fails_the_group(folder: Path) -> None:
    """Two siblings await one task, which the first's timeout cancels; the second is cancelled by nobody."""
    environments = mine(folder, timeout_s=0.2)
    common = __import__("my_environments_of_the_test").common

    async def ask(delay_s: float) -> Any:
        await asyncio.sleep(delay_s)
        return await environments.observe(environments.open(task()), said("together"))

    async def both() -> list[Any]:
        common[asyncio.get_running_loop()] = asyncio.ensure_future(asyncio.sleep(60))
        return await asyncio.gather(ask(0.0), ask(0.1), return_exceptions=True)

    async def called_off() -> None:
        common[asyncio.get_running_loop()] = asyncio.ensure_future(asyncio.sleep(60))
        asking = asyncio.ensure_future(ask(0.0))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asking

    first, second = asyncio.run(both())
    assert isinstance(first, NoAnswer) and isinstance(second, EnvironmentFailed)
    assert "environment/raised: CancelledError: observe awaits what was cancelled elsewhere" in str(second)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(called_off())
    with pytest.raises(EnvironmentFailed, match="environment/raised: CancelledError"):
        observe(mine(folder, "Blocking"), "cancelled")


def test_an_environment_that_would_end_the_process_fails_the_group(folder: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="environment/raised: SystemExit: 3"):
        observe(mine(folder, "Blocking"), "exit")


def test_a_score_that_cannot_be_read_fails_the_group(folder: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="environment/raised: LookupError: nobody kept it"):
        score(mine(folder, "Unscored").open(task()))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": "calculater"}, r"rollout\.environment\.name: got 'calculater', .*did you mean calculator\?"),
        ({"name": "absent_module:Mine"}, "cannot be imported .*expected module:Class beside the recipe"),
        ({"name": "my_environments_of_the_test:Absent"}, "cannot be imported"),
        ({"name": "my_environments_of_the_test:Other"}, "no subclass of slipstream"),
        ({"name": "my_environments_of_the_test:Mine", "options": {"wait": 1}}, r"rollout\.environment\.options: .*'wait'"),
        ({"name": "guess_number", "options": {"numbers": 9}}, r"rollout\.environment\.options\.numbers: unknown key"),
        ({"name": "calculator", "options": {"opening": ""}}, r"rollout\.environment\.options\.opening"),
    ],
)
def test_what_the_recipe_gets_wrong_is_refused_at_the_start(folder: Path, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Environments(Settings(**settings), folder)


def test_an_environment_that_does_not_fit_the_source_is_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"rollout\.environment: not for task train/0/0 .*use data\.source builtin:guess_number"
    ):
        Environments(Settings(name="guess_number")).check(task("133469<"))
    Environments(Settings(name="guess_number")).check(task("3"))
    mine(folder).check(task())


def test_a_single_turn_is_answered_by_nobody() -> None:
    environments = Environments(Settings())
    assert observe(environments, "12") is None and score(environments.open(task())) == {}
