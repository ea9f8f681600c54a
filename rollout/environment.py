"""Episodes: token ids in, a Trajectory out.

An ``Environment`` answers each completion with observation tokens or ends the episode; ``rollout`` runs the turns against a
``Sampler``.  Nothing is tokenised twice: what the policy wrote stays the ids it sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from slipstream.core.records import Message, Status, Task, Trajectory, WeightVersion


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


class Sampler(Protocol):
    """Whatever continues a prompt: the vLLM engine, or a recorded one in tests."""

    async def sample(
        self, prompt_ids: tuple[int, ...], *, request_id: str, seed: int | None = None, max_tokens: int | None = None
    ) -> Completion: ...


class Environment(Protocol):
    """One episode.  ``prompt_ids`` opens it; each completion is answered with the tokens to append, or None at the end."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    async def observe(self, completion: Completion) -> tuple[int, ...] | None: ...


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """A prompt and one response."""

    prompt_ids: tuple[int, ...]

    async def observe(self, completion: Completion) -> tuple[int, ...] | None:
        return None


async def rollout(
    environment: Environment,
    sampler: Sampler,
    *,
    sample_id: str,
    seed: int | None,
    max_tokens: int,
    max_length: int,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Trajectory:
    """Run one episode to its end; the trajectory is not graded yet.

    ``max_tokens`` bounds the tokens of one turn, ``max_length`` prompt, responses and observations together.  Observations
    have loss mask False, log-prob 0.0 and the versions of the token before them.  An episode that has no room for its next
    turn ends with status ``length``, without the observation that did not fit.  ``decode`` gives turns their text where the
    sampler does not.
    """
    response, context, turn = _Response(), environment.prompt_ids, 0
    while True:
        completion = await _turn(context, sampler, sample_id, seed, turn, max_tokens, max_length)
        if decode and not completion.text:
            completion = replace(completion, text=decode(completion.token_ids))
        response.add(completion)
        status = completion.finish
        if status == "aborted" or not completion.token_ids:
            break
        observation = await environment.observe(completion)
        if observation is None:
            break
        context = (*environment.prompt_ids, *response.token_ids, *observation)
        if len(context) >= max_length:
            status = "length"
            break
        response.observe(observation)
        turn += 1
    return response.trajectory(sample_id, environment.prompt_ids, status)


async def _turn(
    context: tuple[int, ...], sampler: Sampler, sample_id: str, seed: int | None, turn: int, max_tokens: int, max_length: int
) -> Completion:
    """Each turn has a request id and a random stream of its own; the first turn's are the sample's."""
    room = max_length - len(context)
    if room < 1:
        raise PromptTooLong(sample_id, len(context), max_length - 1, "max_length leaves no room for a response")
    turn_seed = None if seed is None else (seed + turn * 0x9E3779B97F4A7C15) % 2**63
    request_id = f"{sample_id}/turn{turn}" if turn else sample_id
    return await sampler.sample(context, request_id=request_id, seed=turn_seed, max_tokens=min(max_tokens, room))


class _Response:
    """The response of an episode as it grows."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.loss_mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[WeightVersion] = []
        self.kv_versions: list[WeightVersion] = []
        self.texts: list[str] = []

    def add(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids
        self.loss_mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.kv_versions += completion.kv_versions
        self.texts.append(completion.text)

    def observe(self, observation: tuple[int, ...]) -> None:
        self.token_ids += observation
        self.loss_mask += [False] * len(observation)
        self.logprobs += [0.0] * len(observation)
        self.versions += [self.versions[-1]] * len(observation)
        self.kv_versions += [self.kv_versions[-1]] * len(observation)

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
            text="".join(self.texts),
        )


class PromptTooLong(ValueError):
    """A prompt that leaves no room, or is over the recipe's limit: the task is skipped and counted, never cut."""

    def __init__(self, name: str, length: int, limit: int, reason: str) -> None:
        super().__init__(f"{name}: the prompt has {length} tokens, expected at most {limit} ({reason})")
        self.length, self.limit = length, limit


class PromptEncoder:
    """Tasks to token ids and back, with the policy's own tokenizer.

    Token ids stay as they are.  Messages go through the chat template, with the opening of the assistant's turn.  Text is
    tokenised with the tokenizer's own special tokens; a model that has a BOS and no chat template gets the BOS in front even
    where its tokenizer does not add it by itself.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat: bool = False,
        system_prompt: str | None = None,
        max_prompt_tokens: int | None = None,
        max_length: int | None = None,
    ) -> None:
        """With ``chat``, text is the user's turn.

        ``max_prompt_tokens`` is the recipe's limit; ``max_length`` the context, which must hold one token more.
        """
        self._chat = chat
        self.tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._max_length = max_length
        limits = []
        if max_prompt_tokens is not None:
            limits.append((max_prompt_tokens, "data.max_prompt_tokens"))
        if max_length is not None:
            limits.append((max_length - 1, "model.max_length leaves no room for a response"))
        self._limit = min(limits, default=None)

    def encode(self, task: Task) -> tuple[int, ...]:
        """The prompt's token ids [P].

        Raises PromptTooLong, and ValueError for messages without a chat template, a system prompt for a prompt that is no
        chat, or a prompt without tokens.
        """
        prompt = task.prompt
        if self._chat and isinstance(prompt, str):
            prompt = ({"role": "user", "content": prompt},)
        if isinstance(prompt, str):
            ids = self._encode_text(prompt)
        elif prompt and isinstance(prompt[0], int):
            ids = list(prompt)  # type: ignore[arg-type]
        else:
            ids = self._encode_chat(prompt)  # type: ignore[arg-type]
        if self._system_prompt is not None and (isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))):
            raise ValueError(f"data.system_prompt is set, but task {task.id} is no chat; set data.chat: true, or remove it")
        if not ids:
            raise ValueError(f"task {task.id}: the prompt has no tokens; a model without BOS needs at least one")
        if self._limit is not None and len(ids) > self._limit[0]:
            raise PromptTooLong(f"task {task.id}", len(ids), *self._limit)
        return tuple(ids)

    def demonstration(self, task: Task) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Prompt ids [P] and the ids of the demonstration with the EOS that ends it [L], for the cross-entropy stream.

        The EOS is a label like any other, also for a tokenizer whose padding token is its EOS.  Raises ValueError for a task
        without a demonstration or a tokenizer without EOS, and PromptTooLong.
        """
        if task.completion is None:
            raise ValueError(
                f"task {task.id}: {task.source} has no demonstration; supervised steps need a `completion` column, "
                "or `messages` that end with the assistant's turn"
            )
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no EOS token, so a demonstration cannot end; set eos_token in its files")
        completion = (*self.tokenizer(task.completion, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id)
        prompt = self.encode(task)
        if self._max_length is not None and len(prompt) + len(completion) > self._max_length:
            length = len(prompt) + len(completion)
            raise PromptTooLong(f"task {task.id}", length, self._max_length, "with its demonstration, by model.max_length")
        return prompt, completion

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text that graders see: without special tokens, otherwise exactly what the ids spell."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _encode_text(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text).input_ids)
        eos, bos = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        if ids and ids[-1] == eos and not text.endswith(self.tokenizer.eos_token):
            ids.pop()  # a tokenizer that ends every text would end the response before it begins
        if bos is not None and not self.tokenizer.chat_template and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ValueError(
                "the prompts are chat messages, but the model's tokenizer has no chat template; use an instruction-tuned "
                "model, add a chat_template to its tokenizer, or give `prompt` as text"
            )
        chat = [dict(message) for message in messages]
        if self._system_prompt is not None and chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": self._system_prompt})
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)
