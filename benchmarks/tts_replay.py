"""Recorded responses replayed: what each way of drafting would have had accepted (see benchmarks/tts.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tts_policy import TEMPERATURE, TOKENS, ending

GRAM = 5
TRAIN: Literal["all", "body"] = "body"
"""Whether embeddings and output head of a draft learn too."""


@dataclass(frozen=True, slots=True)
class Response:
    """A recorded response behind its prompt.  From ``start`` (the last prompt token) on: log-probabilities of the next token,
    p over the draft's vocabulary; for each response token, whether it ends a repetition."""

    prompt: int
    start: int
    ids_T: Tensor
    features_TF: Tensor | None
    logp_R: Tensor
    p_RV: Tensor
    repeated: list[bool]


@dataclass(frozen=True, slots=True)
class Round:
    position: int
    expected: float
    """Tokens of the round on average over the draft's own draws."""
    begins_repeated: bool
    """Whether its first drafted token ends a repetition."""
    repeated: bool
    """Whether any of them does."""


@dataclass(frozen=True, slots=True)
class Arm:
    """``every`` = 0 is the frozen draft.  The first ``rest`` rounds measure the draft and teach nothing, as in the engine."""

    every: int
    lr: float = 2e-4
    decay: float = 4.0
    rest: int = 20


ARMS = {"frozen": Arm(0), "tts": Arm(5), "tts_every_round": Arm(1)}


# ---- the drafts


class Drafter(Protocol):
    """A draft along one response.  Tokens at positions up to ``at`` + 1 are committed; the first draft is of ``at`` + 2."""

    layer_ids: tuple[int, ...]
    target_ids_V: Tensor

    def parameters(self) -> list[nn.Parameter]:
        """Those that learn."""
        ...

    def begin(self, response: Response) -> None:
        """Read the prompt."""
        ...

    def logits(self, response: Response, at: int, count: int) -> Tensor:
        """``[K, count, V]`` of K drafts from ``at`` and each of the positions behind it, where the response came true."""
        ...

    def advance(self, count: int) -> None:
        """Keep keys and values of so many of those positions, as the weights made them, as in the engine."""
        ...


class HeadDrafter:
    def __init__(self, folder: Path, embedding: Tensor) -> None:
        from slipstream.rollout.speculation.eagle3 import Eagle3Head

        self.head, self._embedding = Eagle3Head.load(folder), embedding
        self.head.lm_head.requires_grad_(TRAIN == "all")
        self.layer_ids, self.target_ids_V = self.head.layer_ids, self.head.target_ids_V

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.head.parameters() if p.requires_grad]

    def begin(self, response: Response) -> None:
        nothing = torch.zeros(0, dtype=torch.long), torch.zeros(0, TOKENS - 1, dtype=torch.long)
        self._past = self.head(context_of(response, 0, response.start, None), self._embedding, *nothing).past

    def logits(self, response: Response, at: int, count: int) -> Tensor:
        anchors = torch.arange(count)
        drafts = response.ids_T[at + anchors[:, None] + 2 + torch.arange(TOKENS - 1)]
        unrolled = self.head(context_of(response, at, at + count, self._past), self._embedding, anchors, drafts)
        self._new = unrolled.past
        return unrolled.logits_KAV

    def advance(self, count: int) -> None:
        self._past = self._past.then(self._new, count)


def context_of(response: Response, low: int, high: int, past: Any) -> Any:
    from slipstream.rollout.speculation.context import Context

    assert response.features_TF is not None
    return Context.of_one(response.ids_T[low + 1 : high + 1], response.features_TF[low:high], low, past)


class ModelDrafter:
    """A whole model; its k-th draft from a position is its next token k positions later."""

    layer_ids: tuple[int, ...] = ()

    def __init__(self, folder: Path) -> None:
        from slipstream.rollout.speculation.student import DraftModelStudent

        self._student = DraftModelStudent(folder, torch.device("cpu"), train=TRAIN)
        self.target_ids_V = torch.arange(self._student.vocabulary)

    def parameters(self) -> list[nn.Parameter]:
        return self._student.parameters()

    def begin(self, response: Response) -> None:
        from slipstream.rollout.speculation.student import Prefix

        self._prefix = Prefix()
        self._student.extend(self._prefix, response.ids_T[: response.start + 1].tolist())

    def logits(self, response: Response, at: int, count: int) -> Tensor:
        self._committed = self._prefix.length
        (logits_TV,) = self._student.logits([self._prefix], [response.ids_T[at + 1 : at + count + TOKENS].tolist()])
        return torch.stack([logits_TV[k : k + count] for k in range(TOKENS)])

    def advance(self, count: int) -> None:
        length = self._committed + count
        self._prefix.layers = [(keys[:, :length], values[:, :length]) for keys, values in self._prefix.layers]
        self._prefix.length = length


# ---- replay


@torch.no_grad()
def look_at(policy: Any, drafter: Drafter, number: int, ids: Tensor, prompt_length: int) -> Response:
    """One forward pass over the recorded response, from its last prompt token on."""
    from slipstream.rollout.speculation.training import Sample, look

    seen = look(policy, Sample(tuple(ids.tolist()), prompt_length), drafter.layer_ids)
    start, weight = prompt_length - 1, policy.get_output_embeddings().weight
    logp, p = [], []
    for final_CH, next_ids in zip(seen.final_TH[start:-1].split(128), seen.ids_T[start + 1 :].split(128), strict=True):
        logits = F.linear(final_CH, weight) / TEMPERATURE
        logits[:, ending(policy)] = -torch.inf
        of_all = logits.log_softmax(-1)
        logp.append(of_all.gather(-1, next_ids[:, None])[:, 0])
        p.append(of_all[:, drafter.target_ids_V].exp().half())
    response = seen.ids_T[prompt_length:].tolist()
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


def round_at(response: Response, position: int, expected: float) -> Round:
    drafted = response.repeated[position : position + TOKENS]
    return Round(position, expected, drafted[0], any(drafted))


def replay(
    drafter: Drafter, vocabulary: int, response: Response, arm: Arm, figures: dict[str, list[float]], name: str
) -> Iterator[Round]:
    """Rounds along the response.  The draft reads the context behind cached keys and values, as in the engine, and learns from
    the rows whose prefix was accepted, and the first rejected one, of all rounds since its last update."""
    from slipstream.rollout.speculation.loss import draft_loss, position_weights
    from slipstream.rollout.speculation.training import in_draft

    to_draft_W = in_draft(drafter.target_ids_V, vocabulary)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=arm.lr)
    draws = torch.rand(len(response.ids_T), generator=torch.Generator().manual_seed(response.prompt)).tolist()
    with torch.no_grad():
        drafter.begin(response)
    at, end, most = response.start, len(response.ids_T) - TOKENS - 2, (arm.every or 5) * (TOKENS + 1)
    rounds = 0
    while at + TOKENS + 1 <= end:
        started = time.perf_counter()
        count, learns = min(most, end - at), arm.every > 0 and rounds >= arm.rest
        with torch.set_grad_enabled(learns):
            logits = drafter.logits(response, at, count) / TEMPERATURE
        chances_KA = acceptance(logits.detach(), response, at, to_draft_W)
        rows: list[tuple[int, int]] = []
        here = done = 0
        while here + TOKENS + 1 <= count and (done < arm.every or not arm.every):
            chances = chances_KA[:, here].tolist()
            held = next((k for k, chance in enumerate(chances) if draws[at + here + k + 2] >= chance), TOKENS)
            yield round_at(response, at + here + 1 - response.start, 1 + sum(accumulate(chances, mul)))
            rows += [(k, here) for k in range(min(held + 1, TOKENS))]
            here, done = here + held + 1, done + 1
        rounds += done
        if learns:
            ks, places = (torch.tensor(column) for column in zip(*rows, strict=True))
            target = response.p_RV[at - response.start + places + ks + 1].float().clamp_min(1e-30).log()
            loss = draft_loss(logits[ks, places], target, None, position_weights(ks + 1, arm.decay), 0.0)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            figures[f"update_s_{name}"].append(time.perf_counter() - started)
        drafter.advance(here)
        at += here


def acceptance(logits_KAV: Tensor, response: Response, at: int, to_draft_W: Tensor) -> Tensor:
    """min(1, q / p) of the response's own token at each step from each anchor, ``[K, A]``."""
    from slipstream.rollout.speculation.training import kept

    steps, anchors = logits_KAV.shape[:2]
    where = at + torch.arange(anchors)[None] + torch.arange(steps)[:, None] + 1  # position whose next token is drafted
    return kept(logits_KAV, response.ids_T[where + 1], response.logp_R[where - response.start], to_draft_W)


def replay_ngram(response: Response) -> Iterator[Round]:
    """Prompt lookup as vLLM's: what followed the first occurrence of the last 3 (else 2) tokens.  A certain draft is accepted
    where the policy wrote it."""
    ids = response.ids_T.tolist()
    at = response.start + 1
    while at < len(ids) - TOKENS - 2:
        draft = lookup(ids[: at + 1])
        held = 0
        while held < len(draft) and draft[held] == ids[at + 1 + held]:
            held += 1
        yield round_at(response, at - response.start, held + 1.0)
        at += held + 1


def lookup(ids: list[int]) -> list[int]:
    for size in (3, 2):
        tail = ids[-size:]
        for start in range(len(ids) - size):
            if ids[start : start + size] == tail:
                return ids[start + size : start + size + TOKENS]
    return []
