"""AdamW under DeepSpeed: schedule, gradient norm and clipping, and one view of its state over all ZeRO stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.core import schema
from slipstream.trainer.distributed import device

StateKey = Literal["master", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[StateKey, ...] = ("exp_avg", "exp_avg_sq")


def learning_rate(optimizer: schema.Optimizer, step: int, total_steps: int) -> float:
    """Of optimizer step ``step`` (from 0) of ``total_steps``.

    Linear warm-up that reaches ``lr`` at step ``warmup_steps`` − 1, then the schedule, which reaches
    ``min_lr_ratio · lr`` at the last step and stays there.
    """
    warmup = optimizer.warmup_steps
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    remaining = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}[optimizer.schedule]
    floor = 1.0 if optimizer.schedule == "constant" else optimizer.min_lr_ratio
    return optimizer.lr * (floor + (1.0 - floor) * remaining)


def build_adamw(module: nn.Module) -> torch.optim.AdamW:
    """AdamW in two groups: matrices, which decay, and vectors (norms, biases), which do not.

    torch's own and not DeepSpeed's, which compiles C++ at the first start; the fused kernel where there is a GPU.
    Its hyperparameters are ``ShardedAdamW.reset``'s to set.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "decays": True},
        {"params": [p for p in trained if p.ndim <= 1], "decays": False},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, fused=device().type == "cuda")


@dataclass(frozen=True, slots=True)
class _Fragment:
    """What this rank holds of one parameter: ``numel`` elements from ``start`` (in the flattened parameter), which stand at
    ``offset`` in ``flat``, the tensor that AdamW steps and keeps its state by."""

    flat: Tensor
    offset: int
    start: int
    numel: int


class ShardedAdamW:
    """The optimizer of a DeepSpeed engine.

    ZeRO keeps the float32 weights and Adam's moments flattened and cut over the ranks, differently at each stage.  Here they
    are one full tensor per parameter again, for checkpoints that another number of ranks or another stage can read.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._stage = int(engine.zero_optimization_stage())
        self._clip = 0.0

    def reset(self, optimizer: schema.Optimizer) -> None:
        """New hyperparameters, and moments and step count as if nothing had been trained."""
        for group in self._engine.optimizer.param_groups:
            group["betas"], group["eps"] = optimizer.betas, optimizer.eps
            group["weight_decay"] = optimizer.weight_decay if group["decays"] else 0.0
        self._clip = optimizer.max_grad_norm or 0.0
        if self._stage > 0:
            self._engine.optimizer.clip_grad = self._clip
        for _, state in self._states():
            for value in state.values():
                value.zero_()

    def step(self, learning_rate: float) -> float:
        """One update.  Returns the global norm of the gradient before clipping.

        Raises FloatingPointError if that norm is not finite; the weights are then unchanged.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if self._stage == 0:
            norm = float(nn.utils.clip_grad_norm_(self._engine.module.parameters(), self._clip or math.inf))
            if not math.isfinite(norm):
                raise FloatingPointError(f"gradient norm is {norm}")
            self._engine.step()
            return norm
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if self._engine.optimizer.overflow or not math.isfinite(norm):
            raise FloatingPointError(f"gradient norm is {norm}")  # DeepSpeed has left out the update
        return norm

    @property
    def steps(self) -> int:
        """Updates since the last ``reset``, as Adam's bias correction counts them."""
        counts = {int(state["step"]) for _, state in self._states()}
        assert len(counts) == 1, f"parameters have taken different numbers of steps: {counts}"
        return counts.pop()

    @steps.setter
    def steps(self, count: int) -> None:
        for _, state in self._states():
            state["step"].fill_(count)

    def gather(self, parameter: nn.Parameter, key: StateKey) -> Tensor | None:
        """The full float32 tensor of one parameter, on rank 0 (None elsewhere).  Collective: every rank calls."""
        shape = self._shape(parameter)
        full = torch.zeros(math.prod(shape), dtype=torch.float32, device=device())
        if (fragment := self._fragment(parameter)) is not None:
            full.narrow(0, fragment.start, fragment.numel).copy_(self._view(fragment, key))
        if self._stage > 0:
            dist.reduce(full, dst=0)
        return full.view(shape) if dist.get_rank() == 0 else None

    def scatter(self, parameter: nn.Parameter, key: StateKey, full: Tensor) -> None:
        """Put this rank's part of the full tensor in place.  The inverse of ``gather``, without communication."""
        assert tuple(full.shape) == self._shape(parameter), f"got {tuple(full.shape)}, expected {self._shape(parameter)}"
        if (fragment := self._fragment(parameter)) is not None:
            self._view(fragment, key).copy_(full.flatten().narrow(0, fragment.start, fragment.numel))

    def _shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return tuple(parameter.ds_shape if self._stage == 3 else parameter.shape)

    def _view(self, fragment: _Fragment, key: StateKey) -> Tensor:
        source = fragment.flat if key == "master" else self._state(fragment.flat)[key]
        return source.detach().flatten().narrow(0, fragment.offset, fragment.numel)

    def _flats(self) -> list[Tensor]:
        """The tensors that AdamW steps, in DeepSpeed's own order."""
        zero = self._engine.optimizer
        if self._stage == 0:
            return [p for group in zero.param_groups for p in group["params"]]
        if self._stage == 3:
            return zero.fp32_partitioned_groups_flat
        return zero.fp32_groups_flat_partition if hasattr(zero, "bf16_groups") else zero.single_partition_of_fp32_groups

    def _fragment(self, parameter: nn.Parameter) -> _Fragment | None:
        if self._stage == 0:
            return _Fragment(parameter, 0, 0, parameter.numel())
        if self._stage == 3:
            zero = self._engine.optimizer
            group, offset, share = zero.grad_position[zero.get_param_id(parameter)]
            start = min(share * dist.get_rank(), parameter.ds_numel)  # the last ranks' shares may be padding
            return _Fragment(self._flats()[group], offset, start, min(share, parameter.ds_numel - start))
        if (mapping := parameter._hp_mapping) is None:
            return None
        held, place = mapping.hp_fragment_address, mapping.lp_fragment_address
        return _Fragment(self._flats()[mapping.param_group_index], held.start, place.start, held.numel)

    def _states(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        for flat in self._flats():
            yield flat, self._state(flat)

    def _state(self, flat: Tensor) -> dict[str, Tensor]:
        """AdamW's own state of a tensor, made as AdamW would at its first step if it is not there yet."""
        inner = self._engine.optimizer if self._stage == 0 else self._engine.optimizer.optimizer
        state = inner.state[flat]
        if not state:
            on_device = flat.device if inner.defaults["fused"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=on_device)
            for key in MOMENTS:
                state[key] = torch.zeros_like(flat, memory_format=torch.preserve_format)
        return state
