"""The optimizer of the policy, of its warm start, and of the critic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slipstream.core.section import Fraction, NonNegative, Rate, Section

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
"""Of a running mean; 1 would keep it at 0 for good, and Adam would divide 0 by 0."""
_LR = "learning rate after the warm-up"
_SCHEDULE = "how the learning rate goes on after the warm-up, to the last step"


class Optimizer(Section):
    """AdamW with warm-up.  ``min_lr_ratio`` is where a decaying schedule ends."""

    lr: Rate = Field(1e-6, description=_LR)
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = Field(  # a list, where a preset has been merged
        (0.9, 0.95), description="decay of the running means of the gradient and of its square"
    )
    eps: Rate = Field(1e-8, description="added to the root of the squared gradients' mean")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(0.0, description="share of a weight that lr 1 would take off it")
    max_grad_norm: Rate | None = Field(1.0, description="norm to which larger gradients are scaled down; null: no limit")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description=_SCHEDULE)
    warmup_steps: NonNegative = Field(0, description="optimizer steps in which the learning rate rises from 0")
    min_lr_ratio: Fraction = Field(0.1, description="of lr: where a decaying schedule ends")


class CriticOptimizer(Optimizer):
    """As the trainer's, with defaults of its own."""

    lr: Rate = Field(1e-5, description=_LR)


class WarmStartOptimizer(Optimizer):
    """As the trainer's, with defaults of its own; the schedule ends with the warm start."""

    lr: Rate = Field(1e-5, description=_LR)
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description=_SCHEDULE)
