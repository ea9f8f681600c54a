"""Recorded responses replayed: what each way of drafting would have had accepted (see benchmarks/tts.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tts_policy import TEMPERATURE, TOKENS, ending

GRAM = 5


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
