"""Log-probabilities of given tokens, without a second ``[T, V]`` tensor."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


def selective_logprobs(
    logits_TV: Float[Tensor, "T V"], targets_T: Int[Tensor, " T"], *, temperature: float = 1.0, chunk: int = 8192
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Log-probability (nats) of ``targets_T`` under softmax(logits / temperature), and the entropy of that softmax.

    Row t of ``logits_TV`` is the distribution that ``targets_T[t]`` was drawn from: shifting is the caller's.  Targets that
    do not count still have to be valid ids, with a loss weight of 0.  The log-probabilities are differentiable, once;
    the entropy is detached.  Both are float32 (float64 for float64 logits), whatever the dtype of the logits.

    The vocabulary is walked ``chunk`` columns at a time, so the working memory is ``[T, chunk]``.  The backward pass
    recomputes the softmax and allocates the gradient of the logits and nothing else of that shape.

    A logit of −inf is a token of probability 0; a row without a finite logit, or with +inf or NaN, gives NaN.
    Raises ValueError for a temperature that is not positive or a chunk below 1.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature: got {temperature}, expected more than 0; greedy decoding has no log-probabilities to train on"
        )
    if chunk < 1:
        raise ValueError(f"chunk: got {chunk}, expected at least 1 column of the vocabulary")
    logprobs_T, entropy_T = _SelectiveLogprobs.apply(logits_TV, targets_T, temperature, chunk)
    return logprobs_T, entropy_T


class _SelectiveLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
        top_T1 = logits_TV.amax(dim=-1, keepdim=True).to(dtype) / temperature
        total_T, moment_T = (torch.zeros(len(logits_TV), dtype=dtype, device=logits_TV.device) for _ in range(2))
        for part_TC in logits_TV.split(chunk, dim=-1):
            shifted_TC = (part_TC.to(dtype) / temperature).sub_(top_T1)
            odds_TC = shifted_TC.exp()
            total_T += odds_TC.sum(dim=-1)
            # A token of probability 0 adds nothing to the entropy, but 0 × −inf would be NaN.
            moment_T += shifted_TC.clamp_(min=torch.finfo(dtype).min).mul_(odds_TC).sum(dim=-1)
        log_total_T = total_T.log()
        entropy_T = log_total_T - moment_T / total_T
        logprobs_T1 = _log_softmax(logits_TV.gather(-1, targets_T.unsqueeze(-1)), top_T1, log_total_T, temperature)
        ctx.save_for_backward(logits_TV, targets_T, top_T1, log_total_T, logprobs_T1)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T1.squeeze(-1), entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor, _entropy_grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        """d log p(y) / d logit_v = (1[v = y] − p(v)) / temperature."""
        logits_TV, targets_T, top_T1, log_total_T, logprobs_T1 = ctx.saved_tensors
        scaled_T1 = (grad_T / ctx.temperature).unsqueeze(-1)
        grad_TV = torch.empty_like(logits_TV)
        for logits_TC, grad_TC in zip(logits_TV.split(ctx.chunk, dim=-1), grad_TV.split(ctx.chunk, dim=-1), strict=True):
            grad_TC.copy_(_log_softmax(logits_TC, top_T1, log_total_T, ctx.temperature).exp_().mul_(-scaled_T1))
        at_target_T1 = scaled_T1 * -logprobs_T1.expm1()
        return grad_TV.scatter_(-1, targets_T.unsqueeze(-1), at_target_T1.to(grad_TV.dtype)), None, None, None


def _log_softmax(logits_TC: Tensor, top_T1: Tensor, log_total_T: Tensor, temperature: float) -> Tensor:
    """Of some columns, given their row's maximum and log Σ exp(· − maximum).

    The maximum goes first: their sum, the log-sum-exp, would round away the digits that matter when logits are large.
    """
    return (logits_TC.to(top_T1.dtype) / temperature).sub_(top_T1).sub_(log_total_T.unsqueeze(-1))
