"""Episodes: token ids in, a Trajectory out.

An ``Environment`` answers each turn of the policy or ends the episode; ``Episode`` runs the turns against a ``Sampler``.
Nothing is tokenised twice: what the policy wrote stays the ids it sampled, and every turn's prompt is the ids before it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from slipstream.core.records import NO_DRAFTS, DraftCounts, Status, Task, Trajectory, WeightVersion
from slipstream.rollout.failures import EnvironmentFailed
from slipstream.rollout.prompts import PromptTooLong

Observation = str | tuple[int, ...] | None
"""What the policy reads next, as text or token ids; None ends the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One turn as the sampler wrote it; everything but ``finish`` and ``text`` is per token [L].

    ``logprobs`` are the sampler's own, of the distribution it drew from; ``text`` may be empty where the sampler does not
    detokenise.  Example: ids ``(4, 9, 2)``, log-probs ``(-.1, -.2, -.01)``, versions ``(0.3, 0.3, 0.4)``, finish ``"eos"``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[WeightVersion, ...]
    kv_versions: tuple[WeightVersion, ...]
    finish: Status
    text: str = ""
    draft: DraftCounts = NO_DRAFTS


class Sampler(Protocol):
    """Whatever continues a prompt: the vLLM engine, or a recorded one in tests."""

    async def sample(
        self, prompt_ids: tuple[int, ...], *, request_id: str, seed: int | None = None, max_tokens: int | None = None
    ) -> Completion: ...


class ToolError(Exception):
    """What went wrong with a turn, in words for the policy: it reads them as an observation, and may try again."""


class NoAnswer(Exception):
    """The environment did not answer in time.  It may still be at work, so it is not asked again: the episode is over."""


class Environment:
    """The other side of one episode; made anew for every sample, with its task and the recipe's options as arguments.

    ``observe`` may also be a plain function: it then runs on a thread of its own.  ``score`` is what the reward function
    ``environment`` reads at the end; None where the environment has no opinion.
    """

    score: float | None = None

    def __init__(self, task: Task) -> None:
        self.task = task

    async def observe(self, completion: Completion) -> Observation:
        """The answer to a turn, or None at the end of the episode.

        It is asked after every turn, the last one and one that was cut off (``completion.finish == "length"``) included.
        Raise ToolError for what the policy should read as an error; anything else that is raised fails the group.
        """
        raise NotImplementedError


class SingleTurn(Environment):
    """A prompt and one response."""

    async def observe(self, completion: Completion) -> Observation:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``max_tokens`` of one turn, ``max_turns`` of the policy, ``max_length`` of prompt, turns and observations together;
    token ids are below ``vocabulary``."""

    max_tokens: int
    max_turns: int
    max_length: int
    vocabulary: int


class Episode:
    """One sample in the making; ``run`` it once.

    ``observe`` answers a turn (``environments.Environments.observe``); ``encode`` makes ids of its text, given the turn's own
    (``prompts.PromptEncoder.observation``); ``decode`` gives turns their text where the sampler does not.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompt_ids: tuple[int, ...],
        *,
        sample_id: str,
        seed: int | None,
        limits: Limits,
        observe: Callable[[Completion], Awaitable[Observation]],
        encode: Callable[[str, tuple[int, ...]], tuple[int, ...]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.sample_id = sample_id
        self._sampler = sampler
        self._prompt_ids = prompt_ids
        self._seed = seed
        self._limits = limits
        self._observe = observe
        self._encode = encode
        self._decode = decode
        self._response = _Response()

    @property
    def oldest(self) -> WeightVersion | None:
        """The version of the oldest token of the turns that are over; None during the first."""
        return self._response.versions[0] if self._response.versions else None

    async def run(self) -> Trajectory:
        """Play to the end; the trajectory is not graded yet, and its text is that of the last turn.

        Observations have loss mask False, log-prob 0.0 and the versions of the token before them.  The status says why it
        ended: that of the last turn where the environment ended it, ``length`` where a turn was cut off or the context has no
        room for the next one, ``turns`` after ``max_turns``; then what the environment answered last is left out.  ``timeout``
        is an environment that did not answer.
        """
        status: Status = "turns"
        for turn in range(self._limits.max_turns):
            completion = await self._turn(turn)
            self._response.add(completion)
            if completion.finish == "aborted" or not completion.token_ids:
                status = completion.finish
                break
            try:
                observation = await self._observe(completion)
            except NoAnswer:
                status = "timeout"
                break
            if observation is None or completion.finish == "length":
                status = completion.finish
                break
            if turn + 1 < self._limits.max_turns and not self._append(observation, completion):
                status = "length"
                break
        return self._response.trajectory(self.sample_id, self._prompt_ids, status)

    async def _turn(self, turn: int) -> Completion:
        """Each turn has a request id and a random stream of its own; the first turn's are the sample's."""
        context = (*self._prompt_ids, *self._response.token_ids)
        room = self._limits.max_length - len(context)
        if room < 1:
            limit = self._limits.max_length - 1
            raise PromptTooLong(self.sample_id, len(context), limit, "max_length leaves no room for a response")
        completion = await self._sampler.sample(
            context,
            request_id=f"{self.sample_id}/turn{turn}" if turn else self.sample_id,
            seed=None if self._seed is None else (self._seed + turn * 0x9E3779B97F4A7C15) % 2**63,
            max_tokens=min(self._limits.max_tokens, room),
        )
        return completion if completion.text else replace(completion, text=self._decode(completion.token_ids))

    def _append(self, observation: str | tuple[int, ...], completion: Completion) -> bool:
        """Whether the observation, and a token after it, fit into the context; if so they are part of it.

        Raises EnvironmentFailed for ids that the model does not have.
        """
        ids = self._encode(observation, completion.token_ids) if isinstance(observation, str) else observation
        if beyond := [token for token in ids if token >= self._limits.vocabulary]:
            problem = f"got the token id {beyond[0]}, expected ids below the model's vocabulary of {self._limits.vocabulary}"
            raise EnvironmentFailed("environment/wrong_result", problem)
        if len(self._prompt_ids) + len(self._response.token_ids) + len(ids) >= self._limits.max_length:
            return False
        self._response.observe(ids)
        return True


class _Response:
    """The response of an episode as it grows."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.loss_mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[WeightVersion] = []
        self.kv_versions: list[WeightVersion] = []
        self.text = ""
        self.draft = NO_DRAFTS

    def add(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids
        self.loss_mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.kv_versions += completion.kv_versions
        self.text = completion.text
        self.draft = self.draft.plus(completion.draft)

    def observe(self, ids: tuple[int, ...]) -> None:
        self.token_ids += ids
        self.loss_mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [self.versions[-1]] * len(ids)
        self.kv_versions += [self.kv_versions[-1]] * len(ids)

    def trajectory(self, sample_id: str, prompt_ids: tuple[int, ...], status: Status) -> Trajectory:
        return Trajectory(
            sample_id=sample_id,
            prompt_ids=prompt_ids,
            token_ids=tuple(self.token_ids),
            loss_mask=tuple(self.loss_mask),
            behaviour_logprobs=tuple(self.logprobs),
            policy_versions=tuple(self.versions),
            kv_versions=tuple(self.kv_versions),
            status=status,
            text=self.text,
            draft=self.draft,
        )
