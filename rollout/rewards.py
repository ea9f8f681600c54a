"""Rewards: from a group's responses to their scores, each part logged by name.

``exact`` runs in this process, and ``environment`` is the score that the episode's environment gave; ``regex``, ``math``,
``reasoning_gym`` and the user's ``module:function`` run in worker processes with a wall clock.  What cannot be graded fails its
group: a fault is never a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.core.built_in import REWARDS, WITHOUT_CLOCK, ExactOptions, reward_options
from slipstream.core.mistakes import UserError
from slipstream.core.records import Task, Trajectory
from slipstream.core.schema import Reward, RewardPart
from slipstream.rollout.failures import GradingError
from slipstream.rollout.graders import Grader, GraderPool

MOST_REWARD = 1e6
"""The largest score, and sum of scores, of either sign: beyond it advantages lose their digits in float32, and far beyond it
they are infinite."""


class Rewards:
    """Grades groups.  ``search_path`` is the recipe's directory: user functions may stand in a file beside the recipe."""

    def __init__(self, reward: Reward, search_path: Path | None = None) -> None:
        """Raises UserError for an unknown function or options that it does not have, all at once."""
        problems: list[str] = []
        self._parts: list[tuple[RewardPart, Any]] = []
        for index, part in enumerate(reward.parts):
            try:
                self._parts.append((part, reward_options(part, f"reward.parts[{index}]")))
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise UserError("\n".join(problems))
        graders = [_grader(part, options) for part, options in self._parts if part.function not in WITHOUT_CLOCK]
        self._pool = None
        if graders:
            self._pool = GraderPool(graders, workers=reward.workers, timeout_s=reward.timeout_s, search_path=search_path)

    async def start(self, first: Task | None = None) -> None:
        """Start a worker and look at one task.

        Raises UserError if a user's function cannot be imported, or ``first`` lacks what the functions compare with.
        """
        if first is not None:
            for part, _ in self._parts:
                require_gradable(part.function, first.source, first.answer, first.columns)
        if self._pool:
            await self._pool.start()

    async def grade(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The siblings with ``rewards`` (each part, unweighted) and ``reward`` (the weighted sum).

        Raises GradingError, so that the group fails and is counted, if a function raises, hangs, dies or returns anything
        but one number within ± ``MOST_REWARD`` (or None: not applicable) per sibling.
        """
        columns = [(part, await self._scores(part, options, task, trajectories)) for part, options in self._parts]
        return [
            _with_rewards(trajectory, [(part, scores[i]) for part, scores in columns])
            for i, trajectory in enumerate(trajectories)
        ]

    def close(self) -> None:
        """End the worker processes."""
        if self._pool:
            self._pool.close()

    async def _scores(
        self, part: RewardPart, options: Any, task: Task, trajectories: Sequence[Trajectory]
    ) -> list[float | None]:
        built_in = part.function in REWARDS
        if part.function == "environment":
            return [trajectory.rewards.get("environment") for trajectory in trajectories]
        scores: list[float | None]
        if part.function == "exact":
            scores = [_exact(task, trajectory.text, options) for trajectory in trajectories]
        else:
            assert self._pool is not None
            scores = await self._pool.grade(part.function, _arguments(task, trajectories, plain=built_in))
        _check(part.function, scores, len(trajectories))
        if built_in and options.require_eos:
            return [score if _complete(trajectory) else 0.0 for score, trajectory in zip(scores, trajectories, strict=True)]
        return scores


def require_gradable(function: str, source: str, answer: str | None, columns: Mapping[str, Any], key: str = "reward") -> None:
    """Raise UserError, naming ``key``, where a task of ``source`` lacks what a built-in ``function`` compares with."""
    if function in ("exact", "regex", "math") and answer is None:
        raise UserError(
            f"{key}: {function}: tasks of {source} have no answer to compare with; set data.answer_column to one of the "
            f"columns {sorted(columns)}, or use another reward function"
        )
    if function == "reasoning_gym" and "entry" not in columns:
        raise UserError(f"{key}: reasoning_gym: got the source {source}, expected reasoning_gym:<dataset>")


def _grader(part: RewardPart, options: Any) -> Grader:
    fixed = {"pattern": options.pattern} if part.function == "regex" else {} if part.function in REWARDS else part.options
    return Grader(part.function, fixed)


def _exact(task: Task, text: str, options: ExactOptions) -> float:
    if task.answer is None:
        raise GradingError("exact/no_answer", f"task {task.id} has no answer to compare with")
    if options.after is not None:
        _, found, text = text.rpartition(options.after)
        if not found:
            return 0.0
    return float(text.strip() == task.answer.strip())


def _complete(trajectory: Trajectory) -> bool:
    """The policy ended the response itself, by EOS or a stop string."""
    return trajectory.status in ("eos", "stop")


def _arguments(task: Task, trajectories: Sequence[Trajectory], plain: bool) -> dict[str, Any]:
    """Keyword arguments as TRL's trainers pass them: lists over the siblings; chats get chat completions (``plain``: text)."""
    size = len(trajectories)
    messages = [message for message in task.prompt if isinstance(message, Mapping)]
    chat = bool(messages) and not plain
    columns = {name: [value] * size for name, value in task.columns.items()}
    if task.answer is not None:
        columns["answer"] = [task.answer] * size
    return {
        **columns,
        "prompts": [[dict(message) for message in messages] if chat else task.prompt] * size,
        "completions": [[{"role": "assistant", "content": t.text}] if chat else t.text for t in trajectories],
        "completion_ids": [list(t.token_ids) for t in trajectories],
    }


def _check(function: str, scores: Sequence[float | None], size: int) -> None:
    if len(scores) != size:
        raise GradingError(f"{function}/wrong_length", f"got {len(scores)} scores, expected {size}")
    for score in scores:
        if score is not None and not math.isfinite(score):
            raise GradingError(f"{function}/not_finite", f"got {score}, expected finite numbers")


def _with_rewards(trajectory: Trajectory, scores: Sequence[tuple[RewardPart, float | None]]) -> Trajectory:
    rewards = {part.function: score for part, score in scores if score is not None}
    if not rewards:
        raise GradingError("not_applicable", f"no reward function applies to {trajectory.sample_id}: each returned None")
    total = sum(part.weight * score for part, score in scores if score is not None)
    if not math.isfinite(total):
        raise GradingError("total/not_finite", f"the weighted sum of {rewards} is {total}, expected a finite number")
    for name, value in (*rewards.items(), ("total", total)):
        if abs(value) > MOST_REWARD:
            what = f"the weighted sum of {rewards} is {value:g}" if name == "total" else f"got {value:g}"
            raise GradingError(f"{name}/too_large", f"{what}, expected at most {MOST_REWARD:g} of either sign; scale it down")
    return replace(trajectory, reward=total, rewards=rewards)
