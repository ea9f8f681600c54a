"""Test-Time Speculation on SmolLM2-135M: a frozen EAGLE-3 head against one that learns while it serves, on the same responses.

Replay: the policy's responses are recorded once, with the hidden states; every arm then replays them.  A token x of the
policy's was accepted from a draft q with probability min(1, q(x) / p(x)) (speculative sampling is exact), so a replay gives
the acceptance that the arm would have had, with the same random numbers for all arms.  The head is made by `slipstream draft
train` on other, short responses.  EOS is not sampled, so that responses are long.

acceptance_<arm>_<from>        expected tokens per round, in bins of 250 tokens of the response
acceptance_gain_long           tts − frozen beyond 500 tokens, per prompt
acceptance_gain_early          the same within the first 400 tokens
acceptance_gain_novel          the same over rounds that repeat nothing: no token that they draft ends 5 that stood in the response before
acceptance_gain_after_drift    tts − frozen on responses of a policy that was fine-tuned on Python source, with the same head
drift_nats                     log-probability per token that the fine-tuning gave those responses
repeated_share                 the other rounds
update_s_<arm>                 seconds of one update of the head, and of the drafts before it (one thread)

Live: two prompts, one request at a time, in the engine; responses go on past EOS.

tokens_ratio_<arm>_vs_none_<n>     tokens per second over those without speculation, at n tokens of the response
tokens_ratio_vs_frozen_<n>         of tts over the frozen head
live_acceptance_<arm>              tokens per round
update_cost_share                  of the engine's working time
tokens_ratio_<arm>_vs_none_batch4  four requests at a time, 250 tokens each
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch
from common import HERE, WORK, arguments, finish, prepare_environment, say, slipstream
from torch import Tensor
from torch.nn import functional as F

RECIPE = HERE / "tts.yaml"
TEMPERATURE, TOKENS, BIN, GRAM = 0.8, 4, 250, 5
PROMPTS = (
    "Write a very long, detailed story about a lighthouse keeper, chapter by chapter.",
    "Write a very long and detailed guide to growing apples, with many sections.",
    "Write a long dialogue between two friends about fractions, with many turns.",
    "List fifty Python functions with their code, one after the other, each with a docstring.",
    "Write a JSON array of one hundred records of employees with name, age, city and salary.",
    "Work out 37 × 24, 58 × 19, 46 × 73, 91 × 65 and 28 × 84 step by step, explaining every step.",
)


@dataclass(frozen=True, slots=True)
class Response:
    """A recorded response behind its prompt.  From ``start`` (the last prompt token) on: log-probabilities of the next token,
    p over the draft's vocabulary; for each response token, whether it ends a repetition."""

    prompt: int
    start: int
    ids_T: Tensor
    features_TF: Tensor
    logp_R: Tensor
    p_RV: Tensor
    repeated: list[bool]


@dataclass(frozen=True, slots=True)
class Round:
    position: int
    expected: float
    """Tokens of the round on average over the draft's own draws."""
    repeated: bool


@dataclass(frozen=True, slots=True)
class Arm:
    """``every`` = 0 is the frozen head."""

    every: int
    lr: float = 2e-4
    decay: float = 4.0


ARMS = {"frozen": Arm(0), "tts": Arm(5), "tts_every_round": Arm(1)}


def main() -> None:
    quick = arguments(__doc__).quick
    prepare_environment()
    torch.set_num_threads(1)
    head_path = made_head()
    policy, tokenizer = load_policy()
    figures: dict[str, list[float]] = defaultdict(list)
    made = json.loads((head_path / "draft.json").read_text())
    figures["acceptance_on_short_responses"].append(made["length_after"])
    prompts, length = ((0, 3), 600) if quick else (range(len(PROMPTS)), 1250)
    for number, ids, prompt_length in record(policy, tokenizer, list(prompts), length, "own"):
        response = look_at(policy, head_path, number, ids, prompt_length)
        rounds = {}
        for name, arm in ARMS.items():
            if name != "tts_every_round" or number == 0:
                rounds[name] = list(replay(policy, head_path, response, arm, figures, name))
        rounds["ngram"] = list(replay_ngram(response))
        record_figures(figures, rounds, length)
        means = {name: round(sum(r.expected for r in of_arm) / len(of_arm), 3) for name, of_arm in rounds.items()}
        say(f"prompt {number}: {means}, repeated {figures['repeated_share'][-1]:.2f}")
    drifted(policy, tokenizer, head_path, figures, list(prompts)[: 1 if quick else 4], 600)
    live(policy, tokenizer, head_path, figures, (400,) if quick else (400, 1000), (3,) if quick else (2, 3))
    if not quick:
        live_batch(policy, tokenizer, head_path, figures)
    setup = {"model": "SmolLM2-135M-Instruct", "draft": made, "tokens": TOKENS, "temperature": TEMPERATURE, "length": length}
    finish("tts", figures, quick, **setup)


def made_head() -> Path:
    path = WORK / "models" / "smollm2-eagle3"
    if not path.is_dir():
        say("making the head")
        prompts = HERE / "tts_prompts.jsonl"
        slipstream("draft", "train", str(RECIPE), f"data.source={prompts}", f"rollout.speculation.draft={path}", "--quiet")
    return path


def load_policy() -> tuple[Any, Any]:
    from slipstream.cluster.recovery import CACHE
    from slipstream.core.recipe import load_recipe
    from slipstream.trainer.model import load_policy, load_tokenizer, resolve_model

    recipe = load_recipe([RECIPE], [])
    path = resolve_model(recipe.model, recipe.seed, CACHE)
    return load_policy(path, recipe.model).eval().requires_grad_(False), load_tokenizer(path)


def record(policy: Any, tokenizer: Any, prompts: list[int], length: int, whose: str) -> Iterator[tuple[int, Tensor, int]]:
    """Responses of exactly ``length`` tokens, sampled once and kept; prompt and response ids, and the prompt's length."""
    file = WORK / f"tts-responses-{whose}-{length}.pt"
    known: dict[int, tuple[Tensor, int]] = torch.load(file) if file.is_file() else {}
    if missing := [number for number in prompts if number not in known]:
        say(f"recording {length} tokens of prompts {missing}")
        rows = [encoded(tokenizer, number) for number in missing]
        width = max(map(len, rows))
        torch.manual_seed(0)
        torch.set_num_threads(2)
        found = policy.generate(
            torch.tensor([[0] * (width - len(row)) + row for row in rows]),
            attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length,
            suppress_tokens=ending(policy),
            use_cache=True,
        )
        torch.set_num_threads(1)
        known |= {number: (ids[width - len(row) :], len(row)) for number, row, ids in zip(missing, rows, found, strict=True)}
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(known, file)
    for number in prompts:
        yield (number, *known[number])


def encoded(tokenizer: Any, number: int) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPTS[number]}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text).input_ids


def ending(policy: Any) -> list[int]:
    ends = policy.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


@torch.no_grad()
def look_at(policy: Any, head_path: Path, number: int, ids: Tensor, prompt_length: int) -> Response:
    """One forward pass over the recorded response, from its last prompt token on."""
    from slipstream.rollout.speculation.eagle3 import Eagle3Head
    from slipstream.rollout.speculation.training import Sample, look

    head = Eagle3Head.load(head_path)
    seen = look(policy, Sample(tuple(ids.tolist()), prompt_length), head.layer_ids)
    start, weight = prompt_length - 1, policy.get_output_embeddings().weight
    logp, p = [], []
    for final_CH, next_ids in zip(seen.final_TH[start:-1].split(128), seen.ids_T[start + 1 :].split(128), strict=True):
        logits = F.linear(final_CH, weight) / TEMPERATURE
        logits[:, ending(policy)] = -torch.inf
        of_all = logits.log_softmax(-1)
        logp.append(of_all.gather(-1, next_ids[:, None])[:, 0])
        p.append(of_all[:, head.target_ids_V].exp().half())
    response = seen.ids_T[prompt_length:].tolist()
    assert seen.features_TF is not None
    return Response(number, start, seen.ids_T, seen.features_TF, torch.cat(logp), torch.cat(p), repetitions(response))


def repetitions(ids: Sequence[int]) -> list[bool]:
    """Whether the 5 tokens that end at each position stood in the response before."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(1, len(ids) + 1):
        gram = tuple(ids[max(end - GRAM, 0) : end])
        found.append(len(gram) == GRAM and gram in seen)
        seen.add(gram)
    return found


def repeats(response: Response, position: int) -> bool:
    return any(response.repeated[position : position + TOKENS])


def replay(
    policy: Any, head_path: Path, response: Response, arm: Arm, figures: dict[str, list[float]], name: str
) -> Iterator[Round]:
    """Rounds along the response.  The head reads the context behind cached keys and values, as in the engine, and learns from
    the rows whose prefix was accepted, and the first rejected one, of all rounds since its last update."""
    from slipstream.rollout.speculation.eagle3 import Eagle3Head
    from slipstream.rollout.speculation.loss import draft_loss, position_weights

    head, embedding = Eagle3Head.load(head_path), policy.get_input_embeddings().weight
    to_draft = torch.full((len(embedding),), -1)
    to_draft[head.target_ids_V] = torch.arange(len(head.target_ids_V))
    head.lm_head.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=arm.lr)
    draws = torch.rand(len(response.ids_T), generator=torch.Generator().manual_seed(response.prompt)).tolist()
    with torch.no_grad():
        past = head(context_of(response, 0, response.start, None), embedding, *NO_ANCHORS).past
    at, end, most = response.start, len(response.ids_T) - TOKENS - 2, (arm.every or 5) * (TOKENS + 1)
    while at + TOKENS + 1 <= end:
        started = time.perf_counter()
        anchors = torch.arange(min(most, end - at))
        drafts = response.ids_T[at + anchors[:, None] + 2 + torch.arange(TOKENS - 1)]
        with torch.set_grad_enabled(bool(arm.every)):
            unrolled = head(context_of(response, at, at + len(anchors), past), embedding, anchors, drafts)
        logits = unrolled.logits_KAV / TEMPERATURE
        kept = acceptance(logits.detach(), response, at, to_draft)
        rows: list[tuple[int, int]] = []
        here = done = 0
        while here + TOKENS + 1 <= len(anchors) and (done < arm.every or not arm.every):
            chances = kept[:, here].tolist()
            held = next((k for k, chance in enumerate(chances) if draws[at + here + k + 2] >= chance), TOKENS)
            position = at + here + 1 - response.start
            yield Round(position, 1 + sum(accumulate(chances, mul)), repeats(response, position))
            rows += [(k, here) for k in range(min(held + 1, TOKENS))]
            here, done = here + held + 1, done + 1
        if arm.every:
            ks, places = (torch.tensor(column) for column in zip(*rows, strict=True))
            target = response.p_RV[at - response.start + places + ks + 1].float().clamp_min(1e-30).log()
            loss = draft_loss(logits[ks, places], target, None, position_weights(ks + 1, arm.decay), 0.0)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            figures[f"update_s_{name}"].append(time.perf_counter() - started)
        past = longer(past, unrolled.past, here)
        at += here


NO_ANCHORS = (torch.zeros(0, dtype=torch.long), torch.zeros(0, TOKENS - 1, dtype=torch.long))


def context_of(response: Response, low: int, high: int, past: Any) -> Any:
    from slipstream.rollout.speculation.context import Context

    return Context(
        next_ids_S=response.ids_T[low + 1 : high + 1],
        features_SF=response.features_TF[low:high],
        positions_S=torch.arange(low, high),
        sequence_S=torch.zeros(high - low, dtype=torch.long),
        past=past,
    )


def longer(past: Any, new: Any, count: int) -> Any:
    """The past with the first ``count`` of the new positions; they stay as the head of their time made them."""
    from slipstream.rollout.speculation.context import Past

    keys, values = torch.cat([past.keys[0], new.keys[0][:count]]), torch.cat([past.values[0], new.values[0][:count]])
    return Past((keys,), (values,), torch.zeros(len(keys), dtype=torch.long))


def acceptance(logits_KAV: Tensor, response: Response, at: int, to_draft: Tensor) -> Tensor:
    """min(1, q / p) of the response's own token at each step from each anchor, ``[K, A]``."""
    steps, anchors = logits_KAV.shape[:2]
    where = at + torch.arange(anchors)[None] + torch.arange(steps)[:, None] + 1  # position whose next token is drafted
    tokens = to_draft[response.ids_T[where + 1]]
    logq = logits_KAV.log_softmax(-1).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    ratio = (logq - response.logp_R[where - response.start]).exp().clamp(max=1.0)
    return torch.where(tokens >= 0, ratio, torch.zeros(()))


def replay_ngram(response: Response) -> Iterator[Round]:
    """Prompt lookup: what followed the last occurrence of the last 3 (else 2) tokens.  A certain draft is accepted where the
    policy wrote it."""
    ids = response.ids_T.tolist()
    at = response.start + 1
    while at < len(ids) - TOKENS - 2:
        draft = lookup(ids[: at + 1])
        held = 0
        while held < len(draft) and draft[held] == ids[at + 1 + held]:
            held += 1
        yield Round(at - response.start, held + 1.0, repeats(response, at - response.start))
        at += held + 1


def lookup(ids: list[int]) -> list[int]:
    for size in (3, 2):
        tail = ids[-size:]
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == tail:
                return ids[start + size : start + size + TOKENS]
    return []


def record_figures(figures: dict[str, list[float]], rounds: dict[str, list[Round]], length: int) -> None:
    def mean(arm: str, low: float = 0, high: float = float("inf"), novel: bool = False) -> float:
        chosen = [r.expected for r in rounds[arm] if low <= r.position < high and not (novel and r.repeated)]
        return sum(chosen) / len(chosen) if chosen else float("nan")

    for arm in rounds:
        for low in range(0, length - BIN + 1, BIN):
            figures[f"acceptance_{arm}_{low}"].append(mean(arm, low, low + BIN))
        figures[f"acceptance_{arm}"].append(mean(arm))
        figures[f"acceptance_novel_{arm}"].append(mean(arm, novel=True))
    figures["acceptance_gain_long"].append(mean("tts", 500) - mean("frozen", 500))
    figures["acceptance_gain_early"].append(mean("tts", 0, 400) - mean("frozen", 0, 400))
    figures["acceptance_gain_novel"].append(mean("tts", novel=True) - mean("frozen", novel=True))
    figures["repeated_share"].append(sum(r.repeated for r in rounds["frozen"]) / len(rounds["frozen"]))


# ---- a policy that has moved


def drifted(
    policy: Any, tokenizer: Any, head_path: Path, figures: dict[str, list[float]], prompts: list[int], length: int
) -> None:
    moved = fine_tuned(policy, tokenizer)
    for number, ids, prompt_length in record(moved, tokenizer, prompts, length, "moved"):
        response = look_at(moved, head_path, number, ids, prompt_length)
        before = look_at(policy, head_path, number, ids, prompt_length)
        figures["drift_nats"].append((response.logp_R - before.logp_R).mean().item())
        means = {}
        for name in ("frozen", "tts"):
            rounds = list(replay(moved, head_path, response, ARMS[name], figures, f"{name}_after_drift"))
            for low in range(0, length - 199, 200):
                chosen = [r.expected for r in rounds if low <= r.position < low + 200]
                figures[f"acceptance_{name}_after_drift_{low}"].append(sum(chosen) / len(chosen))
            means[name] = sum(r.expected for r in rounds) / len(rounds)
        figures["acceptance_gain_after_drift"].append(means["tts"] - means["frozen"])
        say(f"after drift, prompt {number}: {means}, moved by {figures['drift_nats'][-1]:.3f} nats per token")


def fine_tuned(policy: Any, tokenizer: Any, steps: int = 60, width: int = 256, batch: int = 4) -> Any:
    """The policy after a few steps on source code of Python's own library, kept for the next time."""
    from transformers import AutoModelForCausalLM

    path = WORK / "models" / "smollm2-moved"
    if not path.is_dir():
        say("fine-tuning the policy")
        moved = type(policy)(policy.config)
        moved.load_state_dict(policy.state_dict())
        ids = torch.tensor(
            tokenizer("".join(inspect.getsource(module) for module in (argparse, asyncio.tasks, inspect))).input_ids
        )
        rows = ids[: len(ids) // width * width].view(-1, width)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.AdamW(moved.parameters(), lr=5e-5)
        for step in range(steps):
            chosen = rows[order[torch.arange(step * batch, (step + 1) * batch) % len(rows)]]
            loss = moved(chosen, labels=chosen, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        moved.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)


# ---- live


def speculations(head_path: Path) -> dict[str, dict[str, Any]]:
    head = {"method": "eagle3", "draft": str(head_path), "tokens": TOKENS}
    return {
        "none": {},
        "ngram": {"method": "ngram", "tokens": TOKENS, "lookup_min": 2, "lookup_max": 3},
        "frozen": head,
        "tts": {**head, "tts": {"enabled": True, "every": ARMS["tts"].every, "lr": ARMS["tts"].lr, "train": "body"}},
    }


def live(
    policy: Any, tokenizer: Any, head_path: Path, figures: dict[str, list[float]], marks: Sequence[int], numbers: Sequence[int]
) -> None:
    """One request at a time; every arm starts anew for each prompt, so that it has learnt from this response alone."""
    for number in numbers:
        prompt = encoded(tokenizer, number)
        speeds = {}
        for arm, keys in speculations(head_path).items():
            speeds[arm], stats = asyncio.run(served(policy, head_path, keys, [prompt], marks))
            say(f"live, prompt {number}, {arm}: {speeds[arm]} tokens per second")
            if stats is not None:
                figures[f"live_acceptance_{arm}"].append(1 + stats.acceptance.accepted / max(stats.acceptance.rounds, 1))
                if stats.learning is not None:
                    figures["update_cost_share"].append(stats.learning.update_s / stats.learning.busy_s)
        record_speeds(figures, speeds, {mark: str(mark) for mark in marks})


def live_batch(policy: Any, tokenizer: Any, head_path: Path, figures: dict[str, list[float]], tokens: int = 250) -> None:
    prompts = [encoded(tokenizer, number) for number in range(4)]
    speeds = {}
    for arm, keys in speculations(head_path).items():
        speeds[arm], _ = asyncio.run(served(policy, head_path, keys, prompts, [tokens]))
        say(f"live, four at a time, {arm}: {speeds[arm]} tokens per second")
    record_speeds(figures, speeds, {tokens: "batch4"})


def record_speeds(figures: dict[str, list[float]], speeds: Mapping[str, Mapping[int, float]], names: Mapping[int, str]) -> None:
    for mark, name in names.items():
        for arm in ("ngram", "frozen", "tts"):
            figures[f"tokens_ratio_{arm}_vs_none_{name}"].append(speeds[arm][mark] / speeds["none"][mark])
        figures[f"tokens_ratio_vs_frozen_{name}"].append(speeds["tts"][mark] / speeds["frozen"][mark])


async def served(
    policy: Any, head_path: Path, keys: Mapping[str, Any], prompts: Sequence[Sequence[int]], marks: Sequence[int]
) -> tuple[dict[int, float], Any]:
    """Tokens per second of an engine of its own until each request has written so many tokens (on average), and its drafts."""
    from slipstream.cluster.recovery import CACHE
    from slipstream.core.recipe import load_recipe
    from slipstream.core.records import WeightVersion
    from slipstream.core.schema import Sampling
    from slipstream.core.speculation import Speculation
    from slipstream.rollout.engine import Engine
    from slipstream.trainer.model import resolve_model

    class Unending(Engine):
        def _params(self, seed: int | None, max_tokens: int) -> Any:
            params = super()._params(seed, max_tokens)
            params.ignore_eos = True
            return params

    recipe = load_recipe([RECIPE], [])
    speculation = Speculation.model_validate(keys)
    sampling = Sampling(temperature=TEMPERATURE, max_tokens=max(marks))
    rollout = recipe.rollout.model_copy(update={"speculation": speculation, "sampling": sampling, "max_num_seqs": len(prompts)})
    engine = await Unending.start(
        resolve_model(recipe.model, recipe.seed, CACHE),
        model=recipe.model,
        rollout=rollout,
        max_length=recipe.model.max_length or 2048,
        eos_ids=(),
        seed=0,
        version=WeightVersion(0, 0),
        draft_path=head_path if speculation.draft else None,
    )
    try:
        started, reached = time.perf_counter(), {}
        requests = [asyncio.create_task(engine.sample(tuple(p), request_id=str(i))) for i, p in enumerate(prompts)]
        while not all(request.done() for request in requests):
            await asyncio.wait(requests, timeout=0.02)
            written = engine.sampled_tokens
            for mark in marks:
                if mark not in reached and written >= mark * len(prompts):
                    reached[mark] = written / (time.perf_counter() - started)
        await asyncio.gather(*requests)
        return reached, await engine.drafts()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
