"""vLLM's model runner V1 as the tap sees it: the one place that knows its names.  A runner V2 gets an adapter beside this."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.rollout.speculation.lookahead import Lookahead


@dataclass(frozen=True, slots=True)
class Judged:
    """What one round decided for one request that had a draft.

    ``length`` tokens were committed before the round, ``prompt_length`` of them the prompt's; of ``drafted`` tokens the first
    ``accepted`` were taken over.  Its ``drafted`` rows of the round's tensors begin at ``first_row``; row k is the distribution
    of the token at position ``length + k``.
    """

    request_id: str
    slot: int
    prompt_length: int
    length: int
    drafted: int
    accepted: int
    first_row: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Round:
    """One verification of all running requests; tensors are vLLM's own and must be copied to be kept.

    ``logits_RV`` [rows, V] are the target's, raw; ``probs_RV`` the draft's when it proposed, at the request's temperature
    (None where the draft was certain of its tokens).
    """

    judged: Sequence[Judged]
    logits_RV: Tensor
    probs_RV: Tensor | None
    tokens: Callable[[Judged], list[int]]
    """Prompt and response of a request, this round's tokens included."""


@dataclass(frozen=True, slots=True)
class Part:
    """A request's share of a forward of the target: positions from ``start`` on, in ``rows`` of the hidden states."""

    request_id: str
    start: int
    rows: slice


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward of the target: the hidden states that its draft reads, of each layer in turn [T, H]."""

    parts: Sequence[Part]
    states: Sequence[Tensor]

    def features(self, part: Part) -> Tensor:
        """[n, layers · H] of a request, side by side as the draft reads them."""
        return torch.cat([state_TH[part.rows] for state_TH in self.states], dim=-1).float()


class RunnerV1:
    """Hooks on a ``vllm.v1.worker.gpu_model_runner.GPUModelRunner`` (and its CPU subclass); nothing of vLLM is edited."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.busy_s = 0.0
        self._listened_s = 0.0

    @property
    def target(self) -> torch.nn.Module:
        return self._runner.get_model()

    @property
    def draft(self) -> torch.nn.Module:
        return self._runner.get_draft_model()

    @property
    def output_head(self) -> torch.nn.Module | None:
        """The draft's, where it has one by vLLM's usual name."""
        return getattr(self.draft, "lm_head", None)

    @property
    def max_length(self) -> int:
        return self._runner.max_model_len

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the draft's weights; the tokens that a head maps its vocabulary to are parameters too."""
        return next(p.dtype for p in self.draft.parameters() if p.is_floating_point())

    @property
    def vocabulary(self) -> int:
        return self._runner.model_config.get_vocab_size()

    def borrowed(self) -> dict[str, Tensor]:
        """Parameters of the draft that are the target's own, by identity, under the names of the draft's checkpoint."""
        own = {id(parameter) for parameter in self.target.parameters()}
        shared = {name: p for name, p in self.draft.named_parameters(remove_duplicate=False) if id(p) in own}
        return {
            name.removeprefix("model.") if self._is_head else name: p.detach()[: self.vocabulary] for name, p in shared.items()
        }

    @property
    def _is_head(self) -> bool:
        return self._runner.speculative_config.method != "draft_model"

    def running(self) -> set[str]:
        return set(self._runner.input_batch.req_id_to_index)

    def after_verification(self, listener: Callable[[Round], None]) -> None:
        """Call ``listener`` after each verification, before the next drafts are proposed."""

        def hook(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
            metadata, draft_probs, logits, sampling = arguments
            with self._listening():
                listener(self._round(metadata, draft_probs, logits, sampling, output.sampled_token_ids))

        self._runner.rejection_sampler.register_forward_hook(hook)

    def judge_undefined_drafts(self) -> None:
        """A draft that has diverged proposes by no distribution, and vLLM's kernels would then write token 0: see
        ``make_certain``."""

        def hook(module: Any, arguments: tuple[Any, ...]) -> None:
            metadata, draft_probs, *_ = arguments
            if draft_probs is not None:
                make_certain(draft_probs, metadata.draft_token_ids)

        self._runner.rejection_sampler.register_forward_pre_hook(hook)

    def after_forward(self, listener: Callable[[Forward], None]) -> None:
        """Call ``listener`` after each forward of a target whose draft reads hidden states, before it is verified."""
        execute = self._runner.execute_model

        def observed(scheduled: Any, *arguments: Any, **keywords: Any) -> Any:
            output = execute(scheduled, *arguments, **keywords)
            state = self._runner.execute_model_state
            if state is not None and state.aux_hidden_states is not None:
                with self._listening():
                    listener(Forward(self._parts(scheduled.num_scheduled_tokens), state.aux_hidden_states))
            return output

        self._runner.execute_model = observed

    @contextmanager
    def _listening(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._listened_s += time.perf_counter() - start

    def _parts(self, scheduled: Mapping[str, int]) -> list[Part]:
        batch, parts, row = self._runner.input_batch, [], 0
        for slot, request_id in enumerate(batch.req_ids):
            count = scheduled[request_id]
            parts.append(Part(request_id, int(batch.num_computed_tokens_cpu[slot]), slice(row, row + count)))
            row += count
        return parts

    def measure(self) -> None:
        """Count the seconds of every step of the runner in ``busy_s``."""
        for name in ("execute_model", "sample_tokens"):
            setattr(self._runner, name, self._timed(getattr(self._runner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **keywords)
            finally:
                self.busy_s += time.perf_counter() - start

        return timed

    def look_ahead(self, lookahead: Lookahead) -> None:
        """Let ``lookahead`` say how many tokens each proposal drafts, up to what vLLM asks for, and tell it what rounds take.

        A round's verification is all between the start of the target's forward and the proposal, but for what listeners take.
        Only rounds of pure decoding tell times, and only on a CPU, where a call returns when its work is done.
        """
        execute, propose = self._runner.execute_model, self._runner.drafter.propose
        verifying: tuple[int, float] | None = None

        def timed_execute(scheduled: Any, *arguments: Any, **keywords: Any) -> Any:
            nonlocal verifying
            start = time.perf_counter() - self._listened_s
            output = execute(scheduled, *arguments, **keywords)
            drafts = scheduled.scheduled_spec_decode_tokens
            decoding = all(n == 1 + len(drafts.get(name, ())) for name, n in scheduled.num_scheduled_tokens.items())
            total = scheduled.total_num_scheduled_tokens
            verifying = (total, start) if decoding and total else None
            return output

        def chosen_propose(*arguments: Any, **keywords: Any) -> Any:
            nonlocal verifying
            requests = keywords["common_attn_metadata"].batch_size()
            keywords["num_speculative_tokens"] = min(keywords["num_speculative_tokens"], lookahead.choose(requests))
            start = time.perf_counter()
            drafted = propose(*arguments, **keywords)
            if verifying is not None:
                total, began = verifying
                verify_s = start - self._listened_s - began
                lookahead.took(total, verify_s, drafted.numel(), time.perf_counter() - start)
                verifying = None
            return drafted

        self._runner.execute_model = timed_execute
        self._runner.drafter.propose = chosen_propose

    def _round(self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling: Any, sampled: Tensor) -> Round:
        batch = self._runner.input_batch
        counts = (sampled != -1).sum(dim=1).tolist()
        temperatures = [1.0] * len(counts) if sampling.temperature is None else sampling.temperature.tolist()
        judged, row = [], 0
        for slot, drafted in enumerate(metadata.num_draft_tokens):
            if drafted:
                judged.append(
                    Judged(
                        request_id=batch.req_ids[slot],
                        slot=slot,
                        prompt_length=int(batch.num_prompt_tokens[slot]),
                        length=int(batch.num_tokens_no_spec[slot]),
                        drafted=drafted,
                        accepted=counts[slot] - 1,
                        first_row=row,
                        temperature=temperatures[slot],
                    )
                )
            row += drafted

        def tokens(one: Judged) -> list[int]:
            known = batch.token_ids_cpu[one.slot, : one.length].tolist()
            return known + sampled[one.slot, : one.accepted + 1].tolist()

        return Round(judged, logits[metadata.target_logits_indices], draft_probs, tokens)


def make_certain(probs_RV: Tensor, drafted_R: Tensor) -> None:
    """In place: rows that are not finite become certain of the token that was drafted.

    Rejection sampling is exact for them, whatever drew that token: it is kept with the target's probability of it, and the
    others are drawn by theirs.
    """
    undefined_R1 = ~probs_RV.sum(-1, keepdim=True).isfinite()
    probs_RV.masked_fill_(undefined_R1, 0.0)
    probs_RV.scatter_add_(1, drafted_R[:, None].long(), undefined_R1.to(probs_RV.dtype))
