"""Siblings play side by side: what fails one fails the group, and a group that is too old is called off, whatever its turn."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.core import schema
from slipstream.core.records import Group, Task, WeightVersion
from slipstream.rollout.environment import Completion, Limits
from slipstream.rollout.environments import Environments
from slipstream.rollout.failures import EnvironmentFailed
from slipstream.rollout.groups import GroupAborted, GroupSampler
from slipstream.rollout.prompts import PromptEncoder
from slipstream.rollout.rewards import Rewards
from slipstream.trainer.model import tiny_tokenizer

V3, V4, V5 = (WeightVersion(0, batch) for batch in (3, 4, 5))
FOUR, TWO = 8, 6  # ids of "4" and "2" in the tiny tokenizer


class EngineFailed(RuntimeError):
    """As ``rollout.engine``'s, whose module needs vLLM."""


LAZY = """
import asyncio, threading
from slipstream.rollout.environment import Environment

release = threading.Event()

class Hanging(Environment):
    score = 0.25

    def observe(self, completion):  # comes back when the episode would be in a later turn, and then cheats
        release.wait(10)
        self.score = 1.0
        return "<"

class Lazy(Environment):
    async def observe(self, completion):
        if self.task.answer == "raise" and completion.text == "2":
            raise KeyError("gone")
        if self.task.answer == "slow":
            await asyncio.sleep(60)
        return "<"
"""


class Recorded:
    """Answers each turn by what ``write`` says; ``admitted`` holds what is under way, as the engine's does."""

    def __init__(self, write: Callable[[str], tuple[int, ...]]) -> None:
        self._write = write
        self.version = V3
        self.admitted: dict[str, WeightVersion] = {}

    async def sample(self, prompt_ids: tuple[int, ...], *, request_id: str, **_: Any) -> Completion:
        self.admitted[request_id] = self.version
        try:
            await asyncio.sleep(0 if (ids := self._write(request_id)) else 60)
        finally:
            versions = (self.admitted.pop(request_id),) * len(ids)
        return Completion(token_ids=ids, logprobs=(-0.5,) * len(ids), versions=versions, kv_versions=versions, finish="eos")


def sampler(engine: Recorded, name: str, search_path: Path | None = None, timeout_s: float = 30.0) -> GroupSampler:
    return GroupSampler(
        engine,  # type: ignore[arg-type]
        PromptEncoder(tiny_tokenizer()),
        Environments(schema.Environment(name=name, timeout_s=timeout_s), search_path),
        Rewards(schema.Reward(parts=[schema.RewardPart(function="environment")])),
        seed=0,
        limits=Limits(max_tokens=4, max_turns=3, max_length=64, vocabulary=64),
    )


def sample(groups: GroupSampler, answer: str, size: int = 2) -> Any:
    task = Task(id="t", epoch=0, position=0, prompt="1-7?", answer=answer)
    return groups.sample(task, (1, 5), V3, size)


def test_every_sibling_has_an_environment_and_a_score_of_its_own() -> None:
    """The number is 2.  Sibling 0 guesses 2 at once; sibling 1 guesses 4 until its turns are over."""
    engine = Recorded(lambda request: (TWO if request.startswith("t#0") else FOUR, 2))
    group: Group = asyncio.run(sample(sampler(engine, "guess_number"), "2"))
    found, lost = group.trajectories
    assert (found.reward, dict(found.rewards), found.status, found.token_ids) == (1.0, {"environment": 1.0}, "eos", (TWO, 2))
    less = 47  # the answer "<"
    assert (lost.reward, lost.status, lost.token_ids) == (0.0, "turns", (FOUR, 2, less, FOUR, 2, less, FOUR, 2))
    assert lost.loss_mask == (True, True, False, True, True, False, True, True)


def test_an_environment_that_raises_in_a_later_turn_fails_the_group(tmp_path: Path) -> None:
    (tmp_path / "lazy_environment_of_the_test.py").write_text(LAZY)
    engine = Recorded(lambda request: (TWO if request == "t#1/turn1" else FOUR, 2))
    groups = sampler(engine, "lazy_environment_of_the_test:Lazy", tmp_path)
    with pytest.raises(EnvironmentFailed, match="environment/raised: KeyError: 'gone'"):
        asyncio.run(sample(groups, "raise"))


@pytest.mark.parametrize("where", ["in the first turn", "in the second turn", "between turns"])
def test_a_group_is_called_off_by_its_oldest_turn(tmp_path: Path, where: str) -> None:
    """First turns are of version 3 and, where they are over, the second of version 4: only the bound 4 calls it off."""
    (tmp_path / "lazy_environment_of_the_test.py").write_text(LAZY)
    hangs_at = {"in the first turn": "t#0", "in the second turn": "t#0/turn1", "between turns": "none"}[where]
    engine = Recorded(lambda request: () if request == hangs_at else (FOUR, 2))
    groups = sampler(engine, "lazy_environment_of_the_test:Lazy", tmp_path)

    async def story() -> None:
        running = asyncio.ensure_future(sample(groups, "slow" if where == "between turns" else "go on", size=1))
        while not engine.admitted:
            await asyncio.sleep(0)
        engine.version = V4
        for _ in range(20):
            await asyncio.sleep(0)
        groups.abort_before(V3, ["t", "another"])
        await asyncio.sleep(0)
        assert not running.done()
        groups.abort_before(V4, ["another"])
        for _ in range(20):
            await asyncio.sleep(0)
        assert not running.done()
        groups.abort_before(V4, ["t", "another"])
        with pytest.raises(GroupAborted):
            await asyncio.wait_for(running, 5)
        assert not engine.admitted

    asyncio.run(story())


def test_a_thread_that_hangs_cannot_alter_a_later_turn(tmp_path: Path) -> None:
    """It would answer while the next turn is written, or give itself a score: the episode ends with the score that it had."""
    (tmp_path / "lazy_environment_of_the_test.py").write_text(LAZY)
    engine = Recorded(lambda request: (FOUR, 2))
    groups = sampler(engine, "lazy_environment_of_the_test:Hanging", tmp_path, timeout_s=0.05)
    (trajectory,) = asyncio.run(sample(groups, "2", size=1)).trajectories
    __import__("lazy_environment_of_the_test").release.set()
    assert (trajectory.token_ids, trajectory.status, trajectory.reward) == ((FOUR, 2), "timeout", 0.25)


@pytest.mark.parametrize("first", ["the environment", "the engine"])
def test_a_dead_engine_is_told_whatever_an_environment_does_at_the_same_time(tmp_path: Path, first: str) -> None:
    """Sibling 0 dies with the engine, sibling 1's environment fails: whichever comes first, the run has to end."""
    (tmp_path / "lazy_environment_of_the_test.py").write_text(LAZY)

    class Dying(Recorded):
        async def sample(self, prompt_ids: tuple[int, ...], *, request_id: str, **_: Any) -> Completion:
            if request_id == "t#1":
                return await super().sample(prompt_ids, request_id=request_id)
            try:
                await asyncio.sleep(60 if first == "the environment" else 0)
            finally:  # the others are cancelled, and the engine cannot abort what it no longer runs
                raise EngineFailed("the engine core has died")

    groups = sampler(Dying(lambda request: (TWO, 2)), "lazy_environment_of_the_test:Lazy", tmp_path)
    with pytest.raises(EngineFailed):
        asyncio.run(sample(groups, "raise"))
