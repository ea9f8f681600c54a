"""Divergences between the next-token distributions of student and teacher, over the whole vocabulary.

Per token, unreduced and unmasked, differentiable in the student's logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


def reverse_kl(
    student_TV: Float[Tensor, "T V"], teacher_TV: Float[Tensor, "T V"], *, temperature: float = 1.0, chunk: int = 8192
) -> Float[Tensor, " T"]:
    """KL(π ‖ π_T) = Σ_v π(v) (log π(v) − log π_T(v)) per token, in nats, with π = softmax(student / temperature) and
    π_T = softmax(teacher / temperature).

    "Reverse" as in on-policy distillation (Agarwal et al. 2023, arXiv 2306.13649; Gu et al. 2023, arXiv 2306.08543): the
    student seeks modes of the teacher.  Of (1/4, 3/4) to (1/2, 1/2) it is ln 2 less the entropy, 0.1308.
    Differentiable in ``student_TV``, once; the teacher gets no gradient.  float32 (float64 for float64 logits of the student).

    The vocabulary is walked ``chunk`` columns at a time, twice, so the working memory is ``[T, chunk]``; the backward pass
    allocates the gradient of the student's logits and nothing else of that shape.

    A token that the student never writes (a logit of −inf) adds 0; one that only the teacher never writes gives +inf.
    Raises ValueError for logits of different shapes, a temperature that is not positive or a chunk below 1.
    """
    _require_comparable(student_TV, teacher_TV, temperature, chunk)
    return _ReverseKL.apply(student_TV, teacher_TV, temperature, chunk)


def forward_kl(
    student_TV: Float[Tensor, "T V"], teacher_TV: Float[Tensor, "T V"], *, temperature: float = 1.0, chunk: int = 8192
) -> Float[Tensor, " T"]:
    """KL(π_T ‖ π) = Σ_v π_T(v) (log π_T(v) − log π(v)) per token, in nats; otherwise as ``reverse_kl``.

    "Forward" as in knowledge distillation (Hinton et al. 2015, arXiv 1503.02531): the student covers what the teacher writes.
    Of a student (1/4, 3/4) and a teacher (1/2, 1/2) it is 1/2 ln 2 + 1/2 ln 2/3 = 0.1438.

    A token that the teacher never writes adds 0; one that only the student never writes gives +inf.
    """
    _require_comparable(student_TV, teacher_TV, temperature, chunk)
    return _ForwardKL.apply(student_TV, teacher_TV, temperature, chunk)


def _require_comparable(student_TV: Tensor, teacher_TV: Tensor, temperature: float, chunk: int) -> None:
    if student_TV.shape != teacher_TV.shape:
        raise ValueError(
            f"logits: got {tuple(student_TV.shape)} of the student and {tuple(teacher_TV.shape)} of the teacher, expected the "
            "same tokens and one vocabulary; take a teacher with the student's tokenizer and vocab_size"
        )
    if not temperature > 0:
        raise ValueError(f"temperature: got {temperature}, expected more than 0")
    if chunk < 1:
        raise ValueError(f"chunk: got {chunk}, expected at least 1 column of the vocabulary")


class _ReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student_TV: Tensor, teacher_TV: Tensor, temperature: float, chunk: int) -> Tensor:
        scales = _scales(student_TV, teacher_TV, temperature, chunk)
        kl_T = _kl(student_TV, teacher_TV, *scales, chunk)
        ctx.save_for_backward(student_TV, teacher_TV, kl_T)
        ctx.scales, ctx.chunk = scales, chunk
        return kl_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        """d KL / d logit_v = π(v) (log π(v) − log π_T(v) − KL) / temperature; a row without a gradient gives exact zeros."""
        student_TV, teacher_TV, kl_T = ctx.saved_tensors
        scaled_T1 = (grad_T / ctx.scales[0].temperature).unsqueeze(-1)
        grad_TV = torch.empty_like(student_TV)
        parts = (matrix_TV.split(ctx.chunk, dim=-1) for matrix_TV in (student_TV, teacher_TV, grad_TV))
        for student_TC, teacher_TC, grad_TC in zip(*parts, strict=True):
            probs_TC, gap_TC = _probabilities_and_gap(student_TC, teacher_TC, *ctx.scales)
            slope_TC = gap_TC.sub_(kl_T.unsqueeze(-1)).mul_(probs_TC).mul_(scaled_T1)
            grad_TC.copy_(slope_TC.masked_fill_(scaled_T1 == 0, 0.0))
        return grad_TV, None, None, None


class _ForwardKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student_TV: Tensor, teacher_TV: Tensor, temperature: float, chunk: int) -> Tensor:
        scales = _scales(student_TV, teacher_TV, temperature, chunk)
        kl_T = _kl(teacher_TV, student_TV, scales[1], scales[0], chunk)
        ctx.save_for_backward(student_TV, teacher_TV)
        ctx.scales, ctx.chunk = scales, chunk
        return kl_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        """d KL / d logit_v = (π(v) − π_T(v)) / temperature; a row without a gradient gives exact zeros."""
        student_TV, teacher_TV = ctx.saved_tensors
        student, teacher = ctx.scales
        scaled_T1 = (grad_T / student.temperature).unsqueeze(-1)
        grad_TV = torch.empty_like(student_TV)
        parts = (matrix_TV.split(ctx.chunk, dim=-1) for matrix_TV in (student_TV, teacher_TV, grad_TV))
        for student_TC, teacher_TC, grad_TC in zip(*parts, strict=True):
            slope_TC = student.log_softmax(student_TC).exp_().sub_(teacher.log_softmax(teacher_TC).exp_()).mul_(scaled_T1)
            grad_TC.copy_(slope_TC.masked_fill_(scaled_T1 == 0, 0.0))
        return grad_TV, None, None, None


@dataclass(frozen=True, slots=True)
class _Scale:
    """What turns columns of logits into log-probabilities: their row's maximum, and log Σ exp(· − maximum)."""

    top_T1: Tensor
    log_total_T1: Tensor
    temperature: float

    @classmethod
    def of(cls, logits_TV: Tensor, temperature: float, chunk: int, dtype: torch.dtype) -> _Scale:
        top_T1 = logits_TV.amax(dim=-1, keepdim=True).to(dtype) / temperature
        total_T1 = torch.zeros_like(top_T1)
        for logits_TC in logits_TV.split(chunk, dim=-1):
            total_T1 += (logits_TC.to(dtype) / temperature).sub_(top_T1).exp_().sum(dim=-1, keepdim=True)
        return cls(top_T1, total_T1.log(), temperature)

    def log_softmax(self, logits_TC: Tensor) -> Tensor:
        """The maximum goes first: its sum with the logarithm would round away the digits that matter when logits are large."""
        return (logits_TC.to(self.top_T1.dtype) / self.temperature).sub_(self.top_T1).sub_(self.log_total_T1)


def _scales(student_TV: Tensor, teacher_TV: Tensor, temperature: float, chunk: int) -> tuple[_Scale, _Scale]:
    """Of student and teacher, in the precision of the student: float32, or float64."""
    dtype = torch.float64 if student_TV.dtype == torch.float64 else torch.float32
    student, teacher = (_Scale.of(logits_TV, temperature, chunk, dtype) for logits_TV in (student_TV, teacher_TV))
    return student, teacher


def _kl(from_TV: Tensor, to_TV: Tensor, from_scale: _Scale, to_scale: _Scale, chunk: int) -> Tensor:
    """KL(from ‖ to) per token, ``chunk`` columns at a time."""
    kl_T = torch.zeros_like(from_scale.log_total_T1[:, 0])
    for from_TC, to_TC in zip(from_TV.split(chunk, dim=-1), to_TV.split(chunk, dim=-1), strict=True):
        probs_TC, gap_TC = _probabilities_and_gap(from_TC, to_TC, from_scale, to_scale)
        kl_T += gap_TC.mul_(probs_TC).sum(dim=-1)
    return kl_T


def _probabilities_and_gap(student_TC: Tensor, teacher_TC: Tensor, student: _Scale, teacher: _Scale) -> tuple[Tensor, Tensor]:
    """π(v) and log π(v) − log π_T(v) of some columns, or the other way round; a gap of 0 where the former is 0."""
    logprobs_TC = student.log_softmax(student_TC)
    gap_TC = logprobs_TC - teacher.log_softmax(teacher_TC)
    probs_TC = logprobs_TC.exp_()
    return probs_TC, gap_TC.masked_fill_(probs_TC == 0, 0.0)
