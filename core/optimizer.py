"""The optimizer of the policy, of its warm start, and of the critic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slipstream.core.section import Fraction, NonNegative, Rate, Section


class Optimizer(Section):
    """AdamW with warm-up.  ``min_lr_ratio`` is where a decaying schedule ends."""

    lr: Rate = 1e-6
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)  # a list, where a preset has been merged
    eps: Rate = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    max_grad_norm: Rate | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    min_lr_ratio: Fraction = 0.1


class CriticOptimizer(Optimizer):
    """As the trainer's, with defaults of its own."""

    lr: Rate = 1e-5


class WarmStartOptimizer(Optimizer):
    """As the trainer's, with defaults of its own; the schedule ends with the warm start."""

    lr: Rate = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
