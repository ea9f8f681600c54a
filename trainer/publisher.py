"""The weights' way out of the learner: as the engines load them, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from slipstream.core.mistakes import UserError
from slipstream.core.weights import Bucket, TensorSpec, checksum, plan_buckets


def named_engine_tensors(module: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """``(checkpoint name, parameter)`` in a fixed order, each parameter once; under ZeRO-3 still cut up.

    A tied ``lm_head`` is left out: the engine ties it to the embedding itself, as the config says.
    Raises UserError for an architecture whose checkpoints name or shape tensors otherwise than transformers does in memory
    (fused experts): its weights would not fit the engine.
    """
    if conversions := get_model_conversion_mapping(module, add_legacy=False):
        raise UserError(
            f"{type(module).__name__}: {len(conversions)} of its checkpoint's tensors are renamed or fused on loading; "
            "publishing such models is not built yet. Expected an architecture such as Qwen3ForCausalLM or LlamaForCausalLM"
        )
    yield from module.named_parameters()


def engine_specs(module: PreTrainedModel) -> list[TensorSpec]:
    """Name, dtype and full shape of what is published, at every ZeRO stage the same."""
    return [
        TensorSpec(name, str(parameter.dtype).removeprefix("torch."), full_shape(parameter))
        for name, parameter in named_engine_tensors(module)
    ]


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter before ZeRO-3 cut it up."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def gathered(module: PreTrainedModel, bucket_bytes: int) -> Iterator[tuple[Bucket, list[nn.Parameter]]]:
    """Each bucket with its parameters, whole while the loop body runs (ZeRO-3's are gathered for it, one bucket at a time).

    Every rank has to exhaust the iterator, between optimizer steps.
    """
    parameters = dict(named_engine_tensors(module))
    for bucket in plan_buckets(engine_specs(module), bucket_bytes):
        held = [parameters[spec.name] for spec in bucket.tensors]
        with deepspeed.zero.GatheredParameters(held):
            yield bucket, held


def buckets(module: PreTrainedModel, bucket_bytes: int) -> Iterator[tuple[Bucket, np.ndarray[Any, Any], int]]:
    """``(bucket, its bytes [nbytes] uint8, their CRC-32)``, one at a time, in the trained dtype.

    Ranks other than 0 take part in the gathers and yield nothing.  No more than one bucket (and, under ZeRO-3, its gathered
    parameters) is in memory beside the model, unless the caller keeps them: every bucket has a buffer of its own.
    """
    for bucket, held in gathered(module, bucket_bytes):
        if dist.get_rank() == 0:
            data = torch.empty(bucket.nbytes, dtype=torch.uint8)
            for parameter, (start, end) in zip(held, bucket.offsets(), strict=True):
                data[start:end].copy_(parameter.detach().contiguous().flatten().view(torch.uint8))
            flat = data.numpy()
            yield bucket, flat, checksum(flat)
