"""Rewards: the scores, and that what cannot be graded fails its group with a reason instead of scoring 0."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.records import Status, Task, Trajectory, WeightVersion
from slipstream.core.schema import Reward, RewardPart
from slipstream.rollout.failures import GradingError
from slipstream.rollout.rewards import Rewards


def task(answer: str | None = "12", prompt: Any = "21<", columns: Mapping[str, Any] | None = None) -> Task:
    return Task(id="train/0/3", epoch=0, position=3, prompt=prompt, answer=answer, columns=columns or {}, source="file.jsonl")


def sibling(text: str, status: Status = "eos") -> Trajectory:
    version = (WeightVersion(0, 1),)
    return Trajectory(
        sample_id="train/0/3#0",
        prompt_ids=(1,),
        token_ids=(7,),
        loss_mask=(True,),
        behaviour_logprobs=(-0.1,),
        policy_versions=version,
        kv_versions=version,
        status=status,
        text=text,
    )


def grade(reward: Reward, of: Task, siblings: list[Trajectory], search_path: Path | None = None) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        rewards = Rewards(reward, search_path)
        try:
            return await rewards.grade(of, siblings)
        finally:
            rewards.close()

    return asyncio.run(run())


def scores(function: str, of: Task, siblings: list[Trajectory], **options: Any) -> list[float]:
    reward = Reward(parts=[RewardPart(function=function, options=options)], workers=1)
    return [graded.reward for graded in grade(reward, of, siblings)]


def test_the_environments_score_is_a_part_like_any_other() -> None:
    """Weighted 0.5, with ``exact``: 0.5·0.8 + 1 for the right answer; where nobody scored, the part does not apply."""
    scored = [replace(sibling("12"), rewards={"environment": 0.8}), replace(sibling("21"), rewards={"environment": -1.0})]
    reward = Reward(parts=[RewardPart(function="exact"), RewardPart(function="environment", weight=0.5)])
    graded = grade(reward, task(), [*scored, sibling("12")])
    assert [one.reward for one in graded] == pytest.approx([1.4, -0.5, 1.0])
    assert dict(graded[0].rewards) == {"exact": 1.0, "environment": 0.8} and dict(graded[2].rewards) == {"exact": 1.0}
    with pytest.raises(GradingError, match="not_applicable"):
        grade(Reward(parts=[RewardPart(function="environment")]), task(), [sibling("12")])


def test_exact_compares_the_whole_response_and_wants_its_end() -> None:
    siblings = [sibling(" 12\n"), sibling("21"), sibling("12", "length"), sibling("12", "stop"), sibling("x=12"), sibling("")]
    assert scores("exact", task(), siblings) == [1, 0, 0, 1, 0, 0]
    assert scores("exact", task(), siblings[:3], require_eos=False) == [1, 0, 1]


def test_exact_after_takes_the_last_occurrence_and_wants_one() -> None:
    siblings = [sibling("1:2;2:;=12"), sibling("=21=12"), sibling("12"), sibling("=12=")]
    assert scores("exact", task(), siblings, after="=") == [1, 1, 0, 0]


def test_weighted_sum_with_every_part_logged(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "def brevity(completions, **columns): return [-len(c) if c else None for c in completions]\n"
    )
    parts = [RewardPart(function="exact", weight=2.0), RewardPart(function="my_rewards:brevity", weight=0.25)]
    right, wrong, empty = grade(Reward(parts=parts, workers=1), task(), [sibling("12"), sibling("213"), sibling("")], tmp_path)
    assert (right.reward, right.rewards) == (1.5, {"exact": 1.0, "my_rewards:brevity": -2.0})  # 2·1 − 0.25·2
    assert (wrong.reward, wrong.rewards) == (-0.75, {"exact": 0.0, "my_rewards:brevity": -3.0})
    assert (empty.reward, empty.rewards) == (0.0, {"exact": 0.0})  # None: not applicable, not logged


USER_FUNCTIONS = """
import multiprocessing, os, pathlib, time
def everything(prompts, completions, completion_ids, answer, level, **columns):
    print("chatter must not break the protocol")
    assert prompts == [[{"role": "user", "content": "hi"}]] * 2 and completion_ids == [[7], [7]] and columns == {}
    return [float(c[0]["content"] == a) + n for c, a, n in zip(completions, answer, level)]
async def waits(completions): return [1.0 for _ in completions]
def tuned(completions, scale=1.0): return [scale for _ in completions]
def raises(**_): raise KeyError("boom")
def short(**_): return [1.0]
def beyond(**_): return [10**400, 0.0]
def nan(**_): return [float("nan"), 0.0]
def infinite(**_): return [0.0, float("-inf")]
def text(**_): return ["1.0", "0.0"]
def scalar(**_): return 1.0
def hangs(**_): time.sleep(600)
def forks(**_):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    pathlib.Path(__file__).with_name("pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
def forks_once(completions, **_):
    if "fork" in completions: forks()
    return [0.5 for _ in completions]
def dies(**_): os._exit(3)
def fragile(completions, **_):
    if "die" in completions: os._exit(3)
    return [0.5 for _ in completions]
not_a_function = 3
"""


def test_a_user_function_gets_trl_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_FUNCTIONS)
    chat = task(prompt=({"role": "user", "content": "hi"},), columns={"level": 3})
    parts = [RewardPart(function=f"mine:{name}") for name in ("everything", "waits")]
    parts.append(RewardPart(function="mine:tuned", options={"scale": 4}))
    first, second = grade(Reward(parts=parts, workers=1), chat, [sibling("12"), sibling("21")], tmp_path)
    assert first.rewards == {"mine:everything": 4.0, "mine:waits": 1.0, "mine:tuned": 4.0}
    assert second.reward == 8.0


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "raised"),
        ("short", "wrong_length"),
        ("nan", "not_finite"),
        ("infinite", "not_finite"),
        ("text", "wrong_result"),
        ("scalar", "wrong_result"),
        ("beyond", "wrong_result"),
        ("dies", "crashed"),
        ("hangs", "timeout"),
    ],
)
def test_a_broken_grader_fails_the_group_with_a_reason(tmp_path: Path, function: str, reason: str) -> None:
    (tmp_path / "mine.py").write_text(USER_FUNCTIONS)
    reward = Reward(parts=[RewardPart(function=f"mine:{function}")], timeout_s=0.5, workers=1)
    with pytest.raises(GradingError) as caught:
        grade(reward, task(), [sibling("12"), sibling("21")], tmp_path)
    assert caught.value.reason == f"mine:{function}/{reason}"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.reason, str(again)) == (caught.value.reason, str(caught.value))


def test_a_weighted_sum_that_overflows_fails_the_group(tmp_path: Path) -> None:
    """Each part is finite, 1e308 · 10 is not; the batch's advantages would all be NaN."""
    (tmp_path / "mine.py").write_text("def huge(completions, **_): return [1e308 for _ in completions]")
    reward = Reward(parts=[RewardPart(function="mine:huge", weight=10.0)], workers=1)
    with pytest.raises(GradingError, match=r"total/not_finite: the weighted sum of \{'mine:huge': 1e\+308\} is inf"):
        grade(reward, task(), [sibling("12")], tmp_path)


@pytest.mark.parametrize(
    ("expression", "weight", "problem"),
    [
        ("1e30", 1.0, "mine:f/too_large: got 1e+30, expected at most 1e+06"),
        ("-1e30", 0.0, r"mine:f/too_large: got -1e\+30"),
        ("1e5", 11.0, r"total/too_large: the weighted sum of \{'mine:f': 100000.0\} is 1.1e\+06"),
    ],
)
def test_a_reward_too_large_for_float32_fails_the_group(tmp_path: Path, expression: str, weight: float, problem: str) -> None:
    (tmp_path / "mine.py").write_text(f"def f(completions, **_): return [{expression} for _ in completions]")
    reward = Reward(parts=[RewardPart(function="mine:f", weight=weight)], workers=1)
    with pytest.raises(GradingError, match=problem.replace("1e+", r"1e\+")):
        grade(reward, task(), [sibling("12")], tmp_path)


def test_an_environments_score_has_the_same_bound() -> None:
    reward = Reward(parts=[RewardPart(function="environment")])
    with pytest.raises(GradingError, match="environment/too_large"):
        grade(reward, task(), [replace(sibling("12"), rewards={"environment": 1e7})])
    (most,) = grade(reward, task(), [replace(sibling("12"), rewards={"environment": -1e6})])
    assert most.reward == -1e6


def alive(pid: int) -> bool:
    """Not so a zombie, whose parent has not asked for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended(folder: Path) -> bool:
    """Whether the grader of ``folder`` and its child end within ten seconds."""
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == 2
    for _ in range(100):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.1)
    return False


def test_what_a_grader_started_ends_with_it_and_the_next_group_is_graded(tmp_path: Path) -> None:
    """The child would hold the reply pipe open, and its only thread would wait for it forever."""
    (tmp_path / "mine.py").write_text(USER_FUNCTIONS)

    async def run() -> list[float]:
        rewards = Rewards(Reward(parts=[RewardPart(function="mine:forks_once")], workers=1, timeout_s=5.0), tmp_path)
        try:
            await rewards.start()
            with pytest.raises(GradingError, match="mine:forks_once/timeout"):
                await rewards.grade(task(), [sibling("fork")])
            async with asyncio.timeout(60):
                return [one.reward for one in await rewards.grade(task(), [sibling("12")])]
        finally:
            rewards.close()

    assert asyncio.run(run()) == [0.5] and ended(tmp_path)


PARENT = """
import asyncio, sys
from pathlib import Path
from slipstream.rollout.graders import Grader, GraderPool

pool = GraderPool([Grader("mine:hangs_aloud", {})], workers=1, timeout_s=600, search_path=Path(sys.argv[1]))
asyncio.run(pool.grade("mine:hangs_aloud", {}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for a signal when the parent dies")
def test_a_grader_that_hangs_ends_with_its_parent(tmp_path: Path) -> None:
    """It is in no process group of the job, and reads no end of file while it hangs."""
    hangs = "def hangs_aloud(**_): pathlib.Path(__file__).with_name('pids').write_text(f'{os.getpid()} 0'); time.sleep(600)\n"
    (tmp_path / "mine.py").write_text(f"import os, pathlib, time\n{hangs}")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    try:
        for _ in range(600):
            if (tmp_path / "pids").exists():
                break
            time.sleep(0.1)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    assert ended(tmp_path)


def test_a_worker_that_died_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_FUNCTIONS)

    async def run() -> tuple[list[bool], list[float]]:
        rewards = Rewards(Reward(parts=[RewardPart(function="mine:fragile")], workers=2), tmp_path)
        await rewards.start()
        batches = [[sibling("die")], [sibling("a")], [sibling("die")], [sibling("b")], [sibling("die")]]
        graded = await asyncio.gather(*(rewards.grade(task(), batch) for batch in batches), return_exceptions=True)
        last = await rewards.grade(task(), [sibling("c")])
        rewards.close()
        return [isinstance(one, GradingError) for one in graded], [one.reward for one in last]

    assert asyncio.run(run()) == ([True, False, True, False, True], [0.5])


def test_math_accepts_equal_forms() -> None:
    siblings = [sibling(r"so $\boxed{\frac{1}{2}}$"), sibling("The answer is 0.5"), sibling("2"), sibling("no idea")]
    assert scores("math", task("1/2"), siblings) == [1, 1, 0, 0]
    with pytest.raises(GradingError, match="math/raised: ValueError: got the answer ''"):
        scores("math", task(""), siblings)


def test_regex_takes_the_last_match_and_a_hopeless_pattern_only_fails_its_group() -> None:
    siblings = [sibling("Answer: 3 Answer: 12"), sibling("Answer: 12 Answer: 3"), sibling("12")]
    assert scores("regex", task(), siblings, pattern=r"Answer: (\d+)") == [1, 0, 0]
    reward = Reward(parts=[RewardPart(function="regex", options={"pattern": "((?:a+)+)$"})], timeout_s=0.5, workers=1)
    with pytest.raises(GradingError, match="regex/timeout"):
        grade(reward, task(), [sibling("a" * 60 + "b")])


def test_mistakes_in_the_recipe_are_found_before_the_first_rollout(tmp_path: Path) -> None:
    parts = [
        RewardPart(function="exakt"),
        RewardPart(function="exact", options={"requires_eos": True}),
        RewardPart(function="regex", options={"pattern": "(a"}),
        RewardPart(function="os.system('x'):y"),
    ]
    with pytest.raises(ValueError) as caught:
        Rewards(Reward(parts=parts))
    one, two, three, four = str(caught.value).splitlines()
    assert one.startswith("reward.parts[0].function: got 'exakt'") and one.endswith("did you mean exact?")
    assert two == "reward.parts[1].options.requires_eos: unknown key; did you mean `require_eos`?"
    assert three.startswith("reward.parts[2].options.pattern: got '(a', which is no regular expression")
    assert four.startswith("reward.parts[3].function: got")
    with pytest.raises(ValueError, match=r"with 2 groups, expected exactly one"):
        Rewards(Reward(parts=[RewardPart(function="regex", options={"pattern": "(a)(b)"})]))


@pytest.mark.parametrize(
    ("function", "message"),
    [("mine:absent", "has no attribute"), ("nowhere:f", "No module"), ("mine:not_a_function", "is a int")],
)
def test_a_function_that_cannot_be_imported_stops_the_start(tmp_path: Path, function: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(USER_FUNCTIONS)

    async def run() -> None:
        rewards = Rewards(Reward(parts=[RewardPart(function=function)]), tmp_path)
        try:
            await rewards.start()
        finally:
            rewards.close()

    with pytest.raises(ValueError, match=message):
        asyncio.run(run())


def test_a_source_without_answers_stops_the_start() -> None:
    with pytest.raises(ValueError, match=r"set data\.answer_column to one of the columns \['solution'\]"):
        asyncio.run(Rewards(Reward()).start(task(None, columns={"solution": "3"})))
