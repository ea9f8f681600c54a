"""A real engine: weights change while it generates, and its log-probs are the learner's."""

import asyncio
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from slipstream.core.records import Trajectory, WeightVersion
from slipstream.core.schema import KvOnUpdate, Model, Rollout, Sampling
from slipstream.rollout.engine import Engine, EngineFailed
from slipstream.rollout.environment import Completion, Episode, Limits, Observation
from slipstream.rollout.weights import Staged, Stager, mapped_update
from slipstream.trainer.distributed import free_port, join
from slipstream.trainer.model import resolve_model
from slipstream.trainer.publisher import buckets

pytestmark = pytest.mark.engine

PROMPTS = [(1, 4 + i % 10, 5 + i % 7, 6) for i in range(256)]
TOLERANCE = 1e-4


def perturb(policy: PreTrainedModel, seed: int, scale: float = 0.02) -> None:
    """A weight update: noise on every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)


def stage(stager: Stager, policy: PreTrainedModel, version: WeightVersion, bucket_bytes: int = 1 << 18) -> Staged:
    count = 0
    for bucket, data, crc32 in buckets(policy, bucket_bytes):
        stager.put(str(version), bucket, data, crc32)
        count += 1
    return stager.complete(str(version), count)


def differences(policy: PreTrainedModel, prompt: tuple[int, ...], answer: Completion, t: float = 1.0) -> torch.Tensor:
    """|log-prob of the engine − log-prob of transformers| of each token, at temperature ``t``."""
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    with torch.no_grad():
        logprobs = (policy(ids, use_cache=False).logits[0].double() / t).log_softmax(-1)
    expected = logprobs[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return (expected - torch.tensor(answer.logprobs, dtype=torch.float64)).abs()


def worst_difference(
    policy: PreTrainedModel, prompts: Sequence[tuple[int, ...]], answers: Sequence[Completion], t: float
) -> float:
    """The largest of all ``differences``."""
    return max(differences(policy, p, a, t).max().item() for p, a in zip(prompts, answers, strict=True))


class Running:
    """An engine on its own event loop, with the policy that its weights come from."""

    def __init__(
        self, path: Path, run_id: str, *, max_tokens: int = 48, kv_cache_gib: float = 0.5, kv_on_update: KvOnUpdate = "keep"
    ) -> None:
        if not dist.is_initialized():
            join(0, 1, "127.0.0.1", free_port(), timeout_s=60)
        self.runner = asyncio.Runner()
        self.policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.rollout = Rollout(max_num_seqs=64, kv_cache_gib=kv_cache_gib, sampling=Sampling(max_tokens=max_tokens))
        self.stager = Stager(run_id)
        self.version = WeightVersion(0, 0)
        self.eos = (2,)
        self.engine = self.run(
            Engine.start(
                path,
                model=Model(path=str(path)),
                rollout=self.rollout,
                max_length=512,
                eos_ids=self.eos,
                seed=7,
                version=self.version,
                kv_on_update=kv_on_update,
            )
        )

    def run(self, call):
        return self.runner.run(asyncio.wait_for(call, 300))

    async def answers(self, prompts: Sequence[tuple[int, ...]], tag: str, seeded: bool = False) -> list[Completion]:
        calls = [self.engine.sample(p, request_id=f"{tag}-{i}", seed=i if seeded else None) for i, p in enumerate(prompts)]
        return list(await asyncio.gather(*calls))

    async def update(self, seed: int) -> None:
        perturb(self.policy, seed)
        self.version = self.version.next()
        staged = await asyncio.to_thread(stage, self.stager, self.policy, self.version)
        await self.engine.commit(self.version, mapped_update(staged))
        self.stager.discard(str(self.version))

    def close(self) -> None:
        self.stager.close()
        self.engine.shutdown()
        self.runner.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(resolve_model(Model(path="builtin:tiny"), 0, tmp_path_factory.mktemp("cache")), "test-engine")
    yield running
    running.close()


def test_weights_change_in_the_middle_of_responses(tiny: Running) -> None:
    """Five updates while 256 requests are under way: spans of several versions, in order, none of them unknown.

    Every KV version of a response is the one under which its request was admitted, as seen between two updates.
    """
    admitted: dict[str, WeightVersion] = {}

    async def story() -> list[Completion]:
        start = tiny.engine.sampled_tokens
        answers = asyncio.ensure_future(tiny.answers(PROMPTS, "middle"))
        while tiny.engine.sampled_tokens == start:
            await asyncio.sleep(0.01)
        for seed in range(5):
            admitted.update(tiny.engine.admitted)
            await tiny.update(seed)
        return await answers

    answers = tiny.run(story())
    assert len(admitted) >= 64
    assert any(len(set(a.versions)) >= 2 for a in answers), "no response holds tokens of two versions"
    for number, answer in enumerate(answers):
        assert list(answer.versions) == sorted(answer.versions)
        (kv_version,) = set(answer.kv_versions)
        assert kv_version == admitted.get(f"middle-{number}", kv_version) <= min(answer.versions)
        assert len(answer.token_ids) == len(answer.logprobs) <= 48


def test_engine_equals_learner_after_updates(tiny: Running) -> None:
    """After the five updates, version-pure responses have the log-probs of a transformers forward; at T = 1 and T = 0.7."""
    while tiny.version.batch < 3:
        tiny.run(tiny.update(tiny.version.batch))
    for temperature in (1.0, 0.7):
        sampling = Sampling(max_tokens=48, temperature=temperature)
        tiny.engine._sampling = sampling
        answers = tiny.run(tiny.answers(PROMPTS, f"pure-{temperature}"))
        assert all(set(a.versions) == {tiny.version} for a in answers)
        assert sum(len(a.token_ids) for a in answers) >= 2_500
        assert worst_difference(tiny.policy, PROMPTS, answers, temperature) <= TOLERANCE
    tiny.engine._sampling = tiny.rollout.sampling


def test_the_samples_of_a_group_differ_and_seeds_repeat(tiny: Running) -> None:
    same_prompt = [PROMPTS[0]] * 16
    free = tiny.run(tiny.answers(same_prompt, "free"))
    assert len({a.token_ids for a in free}) > 12, "siblings share a random stream"
    first = tiny.run(tiny.answers(same_prompt, "first", seeded=True))
    second = tiny.run(tiny.answers(same_prompt, "second", seeded=True))
    assert [a.token_ids for a in first] == [a.token_ids for a in second]
    assert len({a.token_ids for a in first}) > 12


def test_no_old_prefix_reaches_a_new_request(tiny: Running) -> None:
    """A prompt of several cache blocks, asked again after an update: its log-probs are the new weights' alone."""
    prompt = tuple(4 + i % 50 for i in range(150))
    tiny.run(tiny.answers([prompt] * 4, "before"))
    tiny.run(tiny.update(99))
    after = tiny.run(tiny.answers([prompt] * 4, "after"))
    assert worst_difference(tiny.policy, [prompt] * 4, after, 1.0) <= TOLERANCE


def test_eos_length_and_cancellation(tiny: Running) -> None:
    answers = tiny.run(tiny.answers(PROMPTS, "finish"))
    for answer in answers:
        ended = answer.token_ids[-1] in tiny.eos
        assert answer.finish == ("eos" if ended else "length")
        assert ended or len(answer.token_ids) == 48
        assert not set(answer.token_ids[:-1]) & set(tiny.eos)

    async def cancel() -> None:
        call = asyncio.ensure_future(tiny.engine.sample(PROMPTS[0], request_id="cancelled"))
        while "cancelled" not in tiny.engine.admitted:  # no sleep: a fast machine would finish the response meanwhile
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    tiny.run(cancel())
    assert not tiny.engine.admitted, "a cancelled request still counts as running"
    assert len(tiny.run(tiny.answers(PROMPTS[:8], "still-alive"))) == 8


def test_stop_strings_end_a_response(tiny: Running) -> None:
    """With "7" as a stop string a response ends at its first 7 (token 11 of the alphabet), which it keeps, with status stop."""
    seven = 4 + 7
    tiny.engine._sampling = Sampling(max_tokens=48, stop=["7"])
    answers = tiny.run(tiny.answers(PROMPTS[:64], "stop"))
    tiny.engine._sampling = tiny.rollout.sampling
    stopped = [a for a in answers if a.finish == "stop"]
    assert stopped and all(a.token_ids[-1] == seven and seven not in a.token_ids[:-1] for a in stopped)
    assert all(a.text.endswith("7") for a in stopped), "the text is what the token ids spell"
    assert all(seven not in a.token_ids for a in answers if a.finish != "stop")
    assert all(len(a.logprobs) == len(a.token_ids) == len(a.versions) for a in answers)


def test_tied_embeddings_follow_the_update(tmp_path: Path) -> None:
    """Faults 2 and 3 of the CPU build: without the repairs the head keeps its old packed weights (error above 0.1)."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2,
    )  # fmt: skip
    source = resolve_model(Model(path="builtin:tiny"), 0, tmp_path / "cache")
    folder = tmp_path / "tied"
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    tied = Running(folder, "test-tied")
    try:
        for seed in range(3):
            tied.run(tied.update(seed))
        answers = tied.run(tied.answers(PROMPTS, "tied"))
        assert worst_difference(tied.policy, PROMPTS, answers, 1.0) <= TOLERANCE
    finally:
        tied.close()


async def updated_midway(running: Running, prompts: Sequence[tuple[int, ...]], tag: str) -> list[Completion]:
    """Answers to ``prompts``, with one update once every request has begun and none can be near its end."""
    start = running.engine.sampled_tokens
    answers = asyncio.ensure_future(running.answers(prompts, tag))
    while running.engine.sampled_tokens - start < 6 * len(prompts):
        await asyncio.sleep(0.002)
    await running.update(1)
    return await answers


def after_the_update(running: Running, prompts: Sequence[tuple[int, ...]], answers: Sequence[Completion]) -> list[torch.Tensor]:
    """Per response with tokens of both versions: how far those of the new one are from a forward of the new policy."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        new = torch.tensor([version == running.version for version in answer.versions])
        if 0 < new.sum() < len(new):
            found.append(differences(running.policy, prompt, answer)[new])
    return found


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_tokens_after_an_update_attend_to_the_entries_they_say(tmp_path: Path, kv_on_update: KvOnUpdate) -> None:
    """``recompute``: the log-probs are the new policy's, to 1e-4.  ``keep``: they are nobody's, since the entries are older."""
    path = resolve_model(Model(path="builtin:tiny"), 0, tmp_path)
    running = Running(path, f"test-kv-{kv_on_update}", max_tokens=160, kv_on_update=kv_on_update)
    try:
        answers = running.run(updated_midway(running, PROMPTS[:48], "midway"))
        off = after_the_update(running, PROMPTS[:48], answers)
        assert len(off) > 10 and sum(len(one) for one in off) > 200
        if kv_on_update == "recompute":
            assert max(one.max() for one in off) <= TOLERANCE
            assert all(answer.kv_versions == answer.versions for answer in answers)
        else:
            assert min(one.max() for one in off) > 10 * TOLERANCE
            assert all(set(answer.kv_versions) == {WeightVersion(0, 0)} for answer in answers)
        again = running.run(running.answers(PROMPTS[:48], "again"))  # and the engine goes on as it should
        assert worst_difference(running.policy, PROMPTS[:48], again, 1.0) <= TOLERANCE
    finally:
        running.close()


def test_a_preempted_request_records_entries_older_than_it_has(tmp_path: Path) -> None:
    """A cache of some 80 blocks of 128 tokens; 64 requests, 120 prompt tokens each, want a second block at the same time.

    vLLM preempts some, and fills their cache again under the new weights: their log-probs are the new policy's alone, while
    ``kv_versions`` still says the version of the admission, which is the oldest that it can be.
    """
    path = resolve_model(Model(path="builtin:tiny"), 0, tmp_path)
    running = Running(path, "test-preempted", kv_cache_gib=0.01)
    prompts = [(1, *(4 + (i + k * (i % 7 + 1)) % 60 for k in range(119))) for i in range(64)]
    try:
        answers = running.run(updated_midway(running, prompts, "crowded"))
        off = [one.max().item() for one in after_the_update(running, prompts, answers)]
        assert any(worst <= TOLERANCE for worst in off), "no request was preempted: make the cache smaller"
        assert any(worst > 10 * TOLERANCE for worst in off), "no request kept its entries: make the cache larger"
        assert all(kv <= version for a in answers for kv, version in zip(a.kv_versions, a.versions, strict=True))
    finally:
        running.close()


def test_turns_continue_the_ids_that_were_sampled_under_the_weights_of_their_moment(tiny: Running) -> None:
    """Thirty episodes of two turns, new weights between the turns: each turn's log-probs are those of its own weights alone.

    The second turn was admitted under the new version, so no KV entry of the old one may reach it, whatever the prefix
    cache holds; the learner's forward on the trajectory's ids is the same as the engine's on its prompt.
    """
    old, old_policy = tiny.version, copy.deepcopy(tiny.policy)
    updated, waiting = asyncio.Event(), []

    async def observe(done: Completion) -> Observation:
        if updated.is_set():
            return None
        waiting.append(done)
        await updated.wait()
        return (47, 5)

    def episode(i: int) -> Episode:
        return Episode(
            tiny.engine,
            PROMPTS[i],
            sample_id=f"turns-{i}",
            seed=None,
            limits=Limits(max_tokens=48, max_turns=4, max_length=256, vocabulary=64),
            observe=observe,
            encode=lambda text, written: (),
            decode=lambda ids: "",
        )

    async def story() -> list[Trajectory]:
        played = [asyncio.ensure_future(episode(i).run()) for i in range(30)]
        while len(waiting) < 30:
            await asyncio.sleep(0.01)
        await tiny.update(1)
        updated.set()
        return await asyncio.gather(*played)

    played = tiny.run(story())
    both = [(i, t) for i, t in enumerate(played) if not all(t.loss_mask)]
    assert len(both) > 5, "too few first turns ended by themselves"
    for i, trajectory in both:
        observed = trajectory.loss_mask.index(False)
        assert trajectory.loss_mask == (True,) * observed + (False,) * 2 + (True,) * (len(trajectory.token_ids) - observed - 2)
        expected = (old,) * (observed + 2) + (tiny.version,) * (len(trajectory.token_ids) - observed - 2)
        assert trajectory.policy_versions == trajectory.kv_versions == expected
        written = Completion(token_ids=trajectory.token_ids, logprobs=trajectory.behaviour_logprobs, versions=expected,
                             kv_versions=expected, finish="eos")  # fmt: skip
        assert differences(old_policy, PROMPTS[i], written)[:observed].max() <= TOLERANCE
        assert differences(tiny.policy, PROMPTS[i], written)[observed + 2 :].max() <= TOLERANCE
        assert differences(old_policy, PROMPTS[i], written)[observed + 2 :].max() > TOLERANCE


def test_a_failed_commit_ends_the_engine(tiny: Running, tmp_path: Path) -> None:
    """Last of the module: a torn file at commit kills the engine rather than letting it resume."""
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"not safetensors")
    with pytest.raises(EngineFailed, match=r"commit of 0\.99 failed"):
        tiny.run(tiny.engine.commit(WeightVersion(0, 99), {"paths": [str(torn)]}))
    with pytest.raises(EngineFailed):
        tiny.run(tiny.engine.sample(PROMPTS[0], request_id="too-late"))
