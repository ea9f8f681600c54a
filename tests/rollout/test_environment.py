"""Episodes are token ids in and out; prompts are encoded as the model expects them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.core.records import Status, Task, WeightVersion
from slipstream.rollout.environment import Completion, Episode, Limits, NoAnswer, Observation
from slipstream.rollout.failures import EnvironmentFailed
from slipstream.rollout.prompts import PromptEncoder, PromptTooLong

V3, V4, V5 = (WeightVersion(0, batch) for batch in (3, 4, 5))
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(*, adds_bos: bool = True, **special: Any) -> PreTrainedTokenizerFast:
    """One token per character; ids: <pad> 0, <bos> 1, <eos> 2, <unk> 3, then the characters."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789<>[]asistnuermyhoq "])}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
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


def completion(ids: tuple[int, ...], versions: tuple[WeightVersion, ...], finish: Status = "eos", text: str = "") -> Completion:
    oldest = (min(versions),) * len(ids) if ids else ()
    return Completion(
        token_ids=ids, logprobs=tuple(-0.1 * i for i in ids), versions=versions, kv_versions=oldest, finish=finish, text=text
    )


async def end(_: Completion) -> Observation:
    return None


def echo(turns: int) -> Callable[[Completion], Awaitable[Observation]]:
    """Answers the first ``turns`` turns with the token 50 and the last sampled one."""
    left = iter(range(turns))

    async def observe(done: Completion) -> Observation:
        return (50, done.token_ids[-1]) if next(left, None) is not None else None

    return observe


def run(observe: Any, sampler: Recorded, prompt_ids: tuple[int, ...], encoder: PromptEncoder | None = None, **limits: int):
    encoder = encoder or PromptEncoder(tokenizer())
    episode = Episode(
        sampler,
        prompt_ids,
        sample_id="train/0/0#1",
        seed=11,
        limits=Limits(**{"max_tokens": 8, "max_turns": 9, "max_length": 100, "vocabulary": 64, **limits}),
        observe=observe,
        encode=partial(encoder.observation, task("")),
        decode=encoder.decode,
    )
    return asyncio.run(episode.run())


def test_a_single_turn_is_the_completion_as_it_was_sampled() -> None:
    sampler = Recorded([completion((4, 9, 2), (V3, V3, V4))])
    trajectory = run(end, sampler, (1, 7))
    assert sampler.asked == [{"prompt_ids": (1, 7), "request_id": "train/0/0#1", "seed": 11, "max_tokens": 8}]
    assert (trajectory.prompt_ids, trajectory.token_ids, trajectory.status) == ((1, 7), (4, 9, 2), "eos")
    assert trajectory.loss_mask == (True,) * 3 and trajectory.behaviour_logprobs == (-0.4, -0.9, -0.2)
    assert trajectory.policy_versions == (V3, V3, V4) and trajectory.kv_versions == (V3, V3, V3)


def test_turns_are_one_sequence_and_observations_carry_no_loss() -> None:
    sampler = Recorded([completion((4, 9), (V3, V4)), completion((5, 2), (V4, V5))])
    trajectory = run(echo(1), sampler, (1, 7))
    assert trajectory.token_ids == (4, 9, 50, 9, 5, 2)
    assert trajectory.loss_mask == (True, True, False, False, True, True)
    assert trajectory.behaviour_logprobs == (-0.4, -0.9, 0.0, 0.0, -0.5, -0.2)
    assert trajectory.policy_versions == (V3, V4, V4, V4, V4, V5)  # an observation has the version of the token before it
    assert trajectory.kv_versions == (V3, V3, V3, V3, V4, V4)  # the second turn was admitted, and prefilled, under version 4
    assert (trajectory.text, trajectory.status) == ("1", "eos")  # of the last turn: 5 is the character "1"
    first, second = sampler.asked
    assert second["prompt_ids"] == (1, 7, 4, 9, 50, 9)  # ids, never text
    assert first["request_id"] != second["request_id"] and first["seed"] != second["seed"] and 0 <= second["seed"] < 2**63


def test_room_in_the_context_bounds_every_turn() -> None:
    sampler = Recorded([completion((4, 9), (V3, V3)), completion((5, 7), (V3, V3))])
    trajectory = run(echo(5), sampler, (1, 7), max_length=9)
    assert [asked["max_tokens"] for asked in sampler.asked] == [7, 3]  # 9 − 2 and 9 − 6
    # after the second turn the context would be 2 + 4 + 2 + 2 = 10 ≥ 9 tokens: the observation is left out
    assert (trajectory.token_ids, trajectory.status) == ((4, 9, 50, 9, 5, 7), "length")
    with pytest.raises(PromptTooLong):
        run(end, Recorded([]), (1, 2, 3), max_length=3)


def test_an_environment_that_does_not_answer_is_not_asked_again() -> None:
    asked = []

    async def hangs(done: Completion) -> Observation:
        asked.append(done.token_ids)
        raise NoAnswer("no answer within 1 s")

    sampler = Recorded([completion((4, 9), (V3, V3)), completion((5, 7), (V3, V3))])
    trajectory = run(hangs, sampler, (1, 7))
    assert (trajectory.token_ids, trajectory.status) == ((4, 9), "timeout")
    assert asked == [(4, 9)] and len(sampler.asked) == 1


def test_an_observation_has_only_token_ids_that_the_model_knows() -> None:
    """63 is the last of 64; the engine would refuse 64, and end the run."""

    async def answers(token: int) -> Observation:
        return (50, token)

    two = [completion((4, 9), (V3, V3)), completion((5, 7), (V3, V3))]
    assert 63 in run(lambda _: answers(63), Recorded(list(two)), (1, 7), max_turns=2).token_ids
    with pytest.raises(EnvironmentFailed, match=r"environment/wrong_result: got the token id 64, expected ids below .* 64"):
        run(lambda _: answers(64), Recorded(list(two)), (1, 7), max_turns=2)


def test_the_status_says_which_limit_ended_the_episode() -> None:
    """Two turns allowed: the answer to the second is left out.  A turn that was cut off is not answered at all."""
    two = [completion((4, 9), (V3, V3)), completion((5, 7), (V3, V3))]
    turns = run(echo(5), Recorded(list(two)), (1, 7), max_turns=2)
    assert (turns.token_ids, turns.status) == ((4, 9, 50, 9, 5, 7), "turns")
    assert run(echo(1), Recorded(list(two)), (1, 7), max_turns=2).status == "eos"  # the environment ended it just in time
    cut = run(echo(5), Recorded([completion((4, 9), (V3, V3), "length")]), (1, 7))
    assert (cut.token_ids, cut.status) == ((4, 9), "length")


def test_an_aborted_turn_ends_the_episode_without_an_observation() -> None:
    trajectory = run(echo(5), Recorded([completion((4,), (V3,), "aborted")]), (1,))
    assert (trajectory.token_ids, trajectory.status) == ((4,), "aborted")
    assert run(echo(5), Recorded([completion((), (), "aborted")]), (1,)).token_ids == ()


def test_ids_that_do_not_survive_decoding_are_kept_over_turns() -> None:
    """3 is <unk> and 1 is <bos>: decoded and encoded again they would be something else.

    The second turn's prompt is what the engine was given and wrote, then the observation's ids; and what the learner gets,
    prompt and response, is what the engine saw, to the last token.
    """
    encoder, first, second = PromptEncoder(tokenizer()), (3, 1, 4, 2), (1, 3, 2)
    assert tuple(tokenizer()(encoder.decode(first)).input_ids) != first
    answers = iter(["<7"])

    async def observe(done: Completion) -> Observation:
        assert done.text == encoder.decode(done.token_ids)
        return next(answers, None)

    sampler = Recorded([completion(first, (V3,) * 4), completion(second, (V4,) * 3)])
    trajectory = run(observe, sampler, (1, 7), encoder)
    assert sampler.asked[1]["prompt_ids"] == (1, 7, *first, 14, 11)  # "<" is 14 and "7" is 11
    assert trajectory.prompt_ids + trajectory.token_ids == sampler.asked[1]["prompt_ids"] + second
    assert trajectory.loss_mask == (True,) * 4 + (False,) * 2 + (True,) * 3
    own = run(end, Recorded([completion(first, (V3,) * 4, text="from the engine")]), (1,))
    assert own.text == "from the engine"


def test_text_has_the_special_tokens_that_its_tokenizer_adds_and_no_others(tmp_path: Path) -> None:
    """So a saved folder, loaded by anybody, asks what training asked."""
    assert PromptEncoder(tokenizer()).encode(task("21<")) == (1, 6, 5, 14)
    assert PromptEncoder(tokenizer(adds_bos=False)).encode(task("21<")) == (6, 5, 14)
    assert PromptEncoder(tokenizer()).encode(task((9, 8))) == (9, 8)
    for adds_bos in (True, False):
        saved = tokenizer(adds_bos=adds_bos)
        saved.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert tuple(loaded("21<").input_ids) == PromptEncoder(saved).encode(task("21<"))


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
        PromptEncoder(tokenizer(adds_bos=False)).encode(task(""))


def test_a_demonstration_ends_with_the_eos_even_where_padding_is_the_eos() -> None:
    for special in ({}, {"pad_token": "<eos>"}):
        encoder = PromptEncoder(tokenizer(**special))
        assert encoder.demonstration(task("21<", "12")) == (((1, 6, 5, 14), (5, 6, 2)),)
    with pytest.raises(ValueError, match=r"file\.jsonl has no demonstration"):
        encoder.demonstration(task("21<"))
    with pytest.raises(ValueError, match="no EOS"):
        PromptEncoder(tokenizer(eos_token=None)).demonstration(task("21<", "12"))


def test_a_demonstration_of_several_turns_is_what_a_rollout_would_have_seen() -> None:
    """``4``, answered by ``<``, then ``2``: the second turn's context is the first's, its text and EOS, and the answer."""
    encoder = PromptEncoder(tokenizer(), max_length=10)
    turns = encoder.demonstration(task("?7?", ("4", "<", "2")))
    assert turns == (((1, 3, 11, 3), (8, 2)), ((1, 3, 11, 3, 8, 2, 14), (6, 2)))
    sampler = Recorded([completion(turn.token_ids, (V3, V3)) for turn in turns])
    answers = iter(["<"])

    async def observe(_: Completion) -> Observation:
        return next(answers, None)

    played = run(observe, sampler, turns[0].context, encoder)
    assert [asked["prompt_ids"] for asked in sampler.asked] == [turn.context for turn in turns]
    assert played.prompt_ids + played.token_ids == turns[-1].context + turns[-1].token_ids
    with pytest.raises(PromptTooLong, match=r"has 10 tokens, expected at most 9 \(with its demonstration"):
        PromptEncoder(tokenizer(), max_length=9).demonstration(task("?77?", ("4", "<", "2")))


def test_a_chat_is_continued_without_rendering_it_again() -> None:
    """The template ends an assistant's turn with <eos> and a space: of that, what the policy did not write itself is added."""
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<eos> {% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    encoder = PromptEncoder(tokenizer(chat_template=template), chat=True)
    spelt = encoder.tokenizer(" [user]7<eos> [assistant]", add_special_tokens=False).input_ids
    assert encoder.observation(task("hi"), "7", (8, 2)) == tuple(spelt)  # the policy wrote the <eos>
    assert encoder.observation(task("hi"), "7", (8,)) == (2, *spelt)  # a stop string ended its turn: the <eos> is missing
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "7"})
    prompt = encoder.encode(task("hi"))
    assert (*prompt, 8, 2, *encoder.observation(task("hi"), "7", (8, 2))) == encoder.encode(task(messages))
    assert encoder.observation(task((1, 5)), "7", (8, 2)) == (11,)  # token ids are no chat
    with pytest.raises(ValueError, match="leaves out what the assistant said"):
        silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
        PromptEncoder(tokenizer(chat_template=silent), chat=True).observation(task("hi"), "7", (8, 2))


def test_an_observation_cannot_write_special_tokens() -> None:
    """A tool's output that spells ``<eos>`` is text: it ends no turn.  (``e`` and ``o`` are in the alphabet of the test.)"""
    ids = PromptEncoder(tokenizer()).observation(task("1"), "<eos>", (2,))
    assert 2 not in ids and len(ids) == 5


def test_text_becomes_the_users_turn_of_a_chat() -> None:
    """With ``chat``, text and the same text as a message give the same ids, system prompt included."""
    encoder = PromptEncoder(tokenizer(chat_template=TEMPLATE), chat=True, system_prompt="ohm")
    text, message = encoder.encode(task("21<")), encoder.encode(task(({"role": "user", "content": "21<"},)))
    assert text == message != PromptEncoder(tokenizer(chat_template=TEMPLATE)).encode(task("21<"))
