"""Text and token ids, with the policy's own tokenizer: prompts, demonstrations, and what an environment answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from slipstream.core.mistakes import UserError
from slipstream.core.records import Message, Task

_MARK = "«what the policy wrote»"


class Turn(NamedTuple):
    """One turn of a demonstration: all ids before it [P], and its own [L]."""

    context: tuple[int, ...]
    token_ids: tuple[int, ...]


class PromptTooLong(ValueError):
    """A prompt that leaves no room, or is over the recipe's limit: the task is skipped and counted, never cut."""

    def __init__(self, name: str, length: int, limit: int, reason: str) -> None:
        super().__init__(f"{name}: the prompt has {length} tokens, expected at most {limit} ({reason})")
        self.length, self.limit = length, limit


class PromptEncoder:
    """Tasks to token ids and back, with the policy's own tokenizer.

    Token ids stay as they are.  Messages go through the chat template, with the opening of the assistant's turn.  Text is
    tokenised with the special tokens that the tokenizer adds by itself, as in TRL and in vLLM's server, and no others: so the
    exported folder is asked as it was trained.  A BOS is there if, and only if, the tokenizer puts it there.
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
        if self._system_prompt is not None and not self.is_chat(task):
            raise UserError(f"data.system_prompt is set, but task {task.id} is no chat; set data.chat: true, or remove it")
        if not ids:
            raise UserError(f"task {task.id}: the prompt has no tokens; a tokenizer that adds no BOS needs at least one")
        if self._limit is not None and len(ids) > self._limit[0]:
            raise PromptTooLong(f"task {task.id}", len(ids), *self._limit)
        return tuple(ids)

    def demonstration(self, task: Task) -> tuple[Turn, ...]:
        """What the policy is to write at each of its turns, for the cross-entropy stream; observations are context only.

        An EOS ends every turn, and is a label like any other, also for a tokenizer whose padding token is its EOS.  Raises
        ValueError for a task without a demonstration or a tokenizer without EOS, and PromptTooLong.
        """
        if task.completion is None:
            raise UserError(
                f"task {task.id}: {task.source} has no demonstration; supervised steps need a `completion` column, "
                "or `messages` that end with the assistant's turn"
            )
        if self.tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no EOS token, so a demonstration cannot end; set eos_token in its files")
        texts = (task.completion,) if isinstance(task.completion, str) else task.completion
        turns, context = [], self.encode(task)
        for policy, reply in zip_longest(texts[::2], texts[1::2]):
            written = (*self.tokenizer(policy, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id)
            turns.append(Turn(context, written))
            context += written
            if reply is not None:
                context += self.observation(task, reply, written)
        if self._max_length is not None and len(context) > self._max_length:
            reason = "with its demonstration, by model.max_length"
            raise PromptTooLong(f"task {task.id}", len(context), self._max_length, reason)
        return tuple(turns)

    def observation(self, task: Task, text: str, written: Sequence[int]) -> tuple[int, ...]:
        """The ids to append after a turn of the policy that ends with ``written``, so that the next one can begin.

        In a chat, ``text`` is a user's message: what the template puts after an assistant's message, up to the opening of the
        next, without the end of turn that the policy wrote itself.  Elsewhere it is the text alone.  Nothing that stands in
        the context already is rendered or tokenised again.
        """
        if not self.is_chat(task):
            return tuple(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)
        chat = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": text},
        ]
        rendered = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        _, found, after = rendered.partition(_MARK)
        if not found:
            raise UserError("the chat template leaves out what the assistant said, so that turns cannot be appended to a chat")
        ids = tuple(self.tokenizer(after, add_special_tokens=False).input_ids)
        return ids[1:] if ids and written and ids[0] == written[-1] else ids

    def is_chat(self, task: Task) -> bool:
        """Whether the task's prompt goes through the chat template."""
        return self._chat if isinstance(task.prompt, str) else bool(task.prompt) and not isinstance(task.prompt[0], int)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text that graders see: without special tokens, otherwise exactly what the ids spell."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _encode_text(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text).input_ids)
        if ids and ids[-1] == self.tokenizer.eos_token_id and not text.endswith(self.tokenizer.eos_token):
            ids.pop()  # a tokenizer that ends every text would end the response before it begins
        return ids

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise UserError(
                "the prompts are chat messages, but the model's tokenizer has no chat template; use an instruction-tuned "
                "model, add a chat_template to its tokenizer, or give `prompt` as text"
            )
        chat = [dict(message) for message in messages]
        if self._system_prompt is not None and chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": self._system_prompt})
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)
