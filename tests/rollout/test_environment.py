"""Episodes are token ids in and out; prompts are encoded as the model expects them."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.core.records import Status, Task, WeightVersion
from slipstream.rollout.environment import Completion, PromptEncoder, PromptTooLong, SingleTurn, rollout

V3, V4, V5 = (WeightVersion(0, batch) for batch in (3, 4, 5))
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    """One token per character; ids: <pad> 0, <bos> 1, <eos> 2, <unk> 3, then the characters."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789<>[]asistnuermyhoq "])}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def task(prompt: Any, completion: str | None = None) -> Task:
    return Task(id="train/0/0", epoch=0, position=0, prompt=prompt, completion=completion, source="file.jsonl")


@dataclass
class Recorded:
    """Answers with recorded completions and keeps what it was asked."""

    completions: list[Completion]
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def sample(self, prompt_ids: tuple[int, ...], **request: Any) -> Completion:
        self.asked.append({"prompt_ids": prompt_ids, **request})
        return self.completions.pop(0)


@dataclass
class Calculator:
    """Answers the first ``turns`` completions with the token 50 and the last sampled one."""

    prompt_ids: tuple[int, ...]
    turns: int

    async def observe(self, completion: Completion) -> tuple[int, ...] | None:
        self.turns -= 1
        return (50, completion.token_ids[-1]) if self.turns >= 0 else None


def completion(ids: tuple[int, ...], versions: tuple[WeightVersion, ...], finish: Status = "eos", text: str = "") -> Completion:
    oldest = (min(versions),) * len(ids) if ids else ()
    return Completion(
        token_ids=ids, logprobs=tuple(-0.1 * i for i in ids), versions=versions, kv_versions=oldest, finish=finish, text=text
    )


def run(environment: Any, sampler: Recorded, max_tokens: int = 8, max_length: int = 100, **options: Any):
    return asyncio.run(
        rollout(environment, sampler, sample_id="train/0/0#1", seed=11, max_tokens=max_tokens, max_length=max_length, **options)
    )


def test_a_single_turn_is_the_completion_as_it_was_sampled() -> None:
    sampler = Recorded([completion((4, 9, 2), (V3, V3, V4))])
    trajectory = run(SingleTurn((1, 7)), sampler)
    assert sampler.asked == [{"prompt_ids": (1, 7), "request_id": "train/0/0#1", "seed": 11, "max_tokens": 8}]
    assert (trajectory.prompt_ids, trajectory.token_ids, trajectory.status) == ((1, 7), (4, 9, 2), "eos")
    assert trajectory.loss_mask == (True,) * 3 and trajectory.behaviour_logprobs == (-0.4, -0.9, -0.2)
    assert trajectory.policy_versions == (V3, V3, V4) and trajectory.kv_versions == (V3, V3, V3)


def test_turns_are_one_sequence_and_observations_carry_no_loss() -> None:
    sampler = Recorded([completion((4, 9), (V3, V4)), completion((5, 2), (V4, V5))])
    trajectory = run(Calculator((1, 7), turns=1), sampler)
    assert trajectory.token_ids == (4, 9, 50, 9, 5, 2)
    assert trajectory.loss_mask == (True, True, False, False, True, True)
    assert trajectory.behaviour_logprobs == (-0.4, -0.9, 0.0, 0.0, -0.5, -0.2)
    assert trajectory.policy_versions == (V3, V4, V4, V4, V4, V5)  # an observation has the version of the token before it
    assert trajectory.kv_versions == (V3, V3, V3, V3, V4, V4)
    first, second = sampler.asked
    assert second["prompt_ids"] == (1, 7, 4, 9, 50, 9)  # ids, never text
    assert first["request_id"] != second["request_id"] and first["seed"] != second["seed"] and 0 <= second["seed"] < 2**63


def test_room_in_the_context_bounds_every_turn() -> None:
    sampler = Recorded([completion((4, 9), (V3, V3)), completion((5,), (V3,), "length")])
    trajectory = run(Calculator((1, 7), turns=5), sampler, max_length=8)
    assert [asked["max_tokens"] for asked in sampler.asked] == [6, 2]  # 8 − 2 and 8 − 6
    # after the second turn the context would be 2 + 4 + 1 + 2 = 9 ≥ 8 tokens: the observation is left out
    assert (trajectory.token_ids, trajectory.status) == ((4, 9, 50, 9, 5), "length")
    with pytest.raises(PromptTooLong):
        run(SingleTurn((1, 2, 3)), Recorded([]), max_length=3)


def test_an_aborted_turn_ends_the_episode_without_an_observation() -> None:
    trajectory = run(Calculator((1,), turns=5), Recorded([completion((4,), (V3,), "aborted")]))
    assert (trajectory.token_ids, trajectory.status) == ((4,), "aborted")
    assert run(Calculator((1,), turns=5), Recorded([completion((), (), "aborted")])).token_ids == ()


def test_ids_that_do_not_survive_decoding_are_kept() -> None:
    # 3 is <unk> and 1 is <bos>: decoded and encoded again they would be something else
    encoder = PromptEncoder(tokenizer())
    ids = (3, 1, 4, 2)
    trajectory = run(SingleTurn((1,)), Recorded([completion(ids, (V3,) * 4)]), decode=encoder.decode)
    assert trajectory.token_ids == ids and trajectory.text == "0"
    assert encoder.encode(task(trajectory.text)) != (1, *ids)
    own = run(SingleTurn((1,)), Recorded([completion(ids, (V3,) * 4, text="from the engine")]), decode=encoder.decode)
    assert own.text == "from the engine"


def test_text_gets_the_bos_that_its_tokenizer_leaves_out() -> None:
    assert PromptEncoder(tokenizer()).encode(task("21<")) == (1, 6, 5, 14)
    assert PromptEncoder(tokenizer(bos_token=None)).encode(task("21<")) == (6, 5, 14)
    assert PromptEncoder(tokenizer(chat_template=TEMPLATE)).encode(task("21<")) == (6, 5, 14)
    assert PromptEncoder(tokenizer()).encode(task((9, 8))) == (9, 8)


def test_messages_go_through_the_chat_template() -> None:
    chat = ({"role": "user", "content": "hi"},)
    encoder = PromptEncoder(tokenizer(chat_template=TEMPLATE))
    assert encoder.decode(encoder.encode(task(chat))) == "[user]hi[assistant]"
    strict = PromptEncoder(tokenizer(chat_template=TEMPLATE), system_prompt="ohm")
    assert strict.decode(strict.encode(task(chat))) == "[system]ohm[user]hi[assistant]"
    own = ({"role": "system", "content": "no"}, *chat)
    assert strict.decode(strict.encode(task(own))) == "[system]no[user]hi[assistant]"
    with pytest.raises(ValueError, match=r"data\.system_prompt is set, but task train/0/0 is no chat"):
        strict.encode(task("21<"))
    with pytest.raises(ValueError, match="tokenizer has no chat template"):
        PromptEncoder(tokenizer()).encode(task(chat))


def test_a_prompt_without_room_is_refused_with_its_numbers() -> None:
    def encoded(**limits: int) -> tuple[int, ...]:
        return PromptEncoder(tokenizer(), **limits).encode(task("123"))  # 4 tokens with the BOS

    assert len(encoded(max_prompt_tokens=4)) == len(encoded(max_length=5)) == 4
    for limits, limit in (
        ({"max_prompt_tokens": 3}, 3),
        ({"max_length": 4}, 3),
        ({"max_length": 3, "max_prompt_tokens": 4}, 2),
    ):
        with pytest.raises(PromptTooLong) as caught:
            encoded(**limits)
        assert (caught.value.length, caught.value.limit) == (4, limit)
    with pytest.raises(ValueError, match="has no tokens"):
        PromptEncoder(tokenizer(bos_token=None)).encode(task(""))


def test_a_demonstration_ends_with_the_eos_even_where_padding_is_the_eos() -> None:
    for special in ({}, {"pad_token": "<eos>"}):
        encoder = PromptEncoder(tokenizer(**special))
        assert encoder.demonstration(task("21<", "12")) == ((1, 6, 5, 14), (5, 6, 2))
    with pytest.raises(ValueError, match=r"file\.jsonl has no demonstration"):
        encoder.demonstration(task("21<"))
    with pytest.raises(ValueError, match="no EOS"):
        PromptEncoder(tokenizer(eos_token=None)).demonstration(task("21<", "12"))


def test_text_becomes_the_users_turn_of_a_chat() -> None:
    """With ``chat``, text and the same text as a message give the same ids, system prompt included."""
    encoder = PromptEncoder(tokenizer(chat_template=TEMPLATE), chat=True, system_prompt="ohm")
    text, message = encoder.encode(task("21<")), encoder.encode(task(({"role": "user", "content": "21<"},)))
    assert text == message != PromptEncoder(tokenizer(chat_template=TEMPLATE)).encode(task("21<"))
