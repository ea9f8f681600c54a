"""vLLM's model runner V1 as the tap sees it: the one place that knows its names.  A runner V2 gets an adapter beside this."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


class RunnerV1:
    """Hooks on a ``vllm.v1.worker.gpu_model_runner.GPUModelRunner`` (and its CPU subclass); nothing of vLLM is edited."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.busy_s = 0.0

    @property
    def target(self) -> torch.nn.Module:
        return self._runner.get_model()

    @property
    def draft(self) -> torch.nn.Module:
        return self._runner.get_draft_model()

    @property
    def max_length(self) -> int:
        return self._runner.max_model_len

    @property
    def device(self) -> torch.device:
        return self._runner.device

    def shared(self) -> set[str]:
        """Names of the draft's parameters that are the target's own, by identity."""
        own = {id(parameter) for parameter in self.target.parameters()}
        return {name for name, parameter in self.draft.named_parameters() if id(parameter) in own}

    def running(self) -> set[str]:
        return set(self._runner.input_batch.req_id_to_index)

    def after_verification(self, listener: Callable[[Round], None]) -> None:
        """Call ``listener`` after each verification, before the next drafts are proposed."""

        def hook(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
            metadata, draft_probs, logits, sampling = arguments
            listener(self._round(metadata, draft_probs, logits, sampling, output.sampled_token_ids))

        self._runner.rejection_sampler.register_forward_hook(hook)

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
