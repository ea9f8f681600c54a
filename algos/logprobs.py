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
        logsumexp_T = top_T1.squeeze(-1) + total_T.log()
        entropy_T = total_T.log() - moment_T / total_T
        chosen_T = logits_TV.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1).to(dtype) / temperature
        ctx.save_for_backward(logits_TV, targets_T, logsumexp_T)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy_T)
        return chosen_T - logsumexp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor, _entropy_grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        """d log p(y) / d logit_v = (1[v = y] − p(v)) / temperature."""
        logits_TV, targets_T, logsumexp_T = ctx.saved_tensors
        scaled_T1 = (grad_T / ctx.temperature).unsqueeze(-1)
        grad_TV = torch.empty_like(logits_TV)
        for start in range(0, logits_TV.shape[-1], ctx.chunk):
            columns = slice(start, start + ctx.chunk)
            prob_TC = (logits_TV[:, columns].to(grad_T.dtype) / ctx.temperature).sub_(logsumexp_T.unsqueeze(-1)).exp_()
            grad_TV[:, columns] = prob_TC.mul_(-scaled_T1)
        chosen_T1 = targets_T.unsqueeze(-1)
        prob_T1 = (logits_TV.gather(-1, chosen_T1).to(grad_T.dtype) / ctx.temperature - logsumexp_T.unsqueeze(-1)).exp_()
        grad_TV.scatter_(-1, chosen_T1, (scaled_T1 * (1 - prob_T1)).to(grad_TV.dtype))
        return grad_TV, None, None, None
