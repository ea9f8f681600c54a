"""What only a GPU can show.  Skipped without one; docs/hardware.md says where these have run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core import schema
from slipstream.core.records import TrainBatch, TrainSample, WeightVersion
from slipstream.core.weights import check_bucket
from slipstream.rollout.cuda_ipc import export_handle, open_handle
from slipstream.trainer.learner import Learner

pytestmark = [
    pytest.mark.learner,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Build = Callable[..., schema.Recipe]


def copy_task(seed: int, count: int = 64) -> TrainBatch:
    """Learn to repeat the prompt: a batch of cross-entropy with something to learn."""
    rng = random.Random(seed)
    samples = []
    for i in range(count):
        prompt = tuple(rng.randrange(4, 14) for _ in range(4))
        zeros, ones = (0.0,) * 4, (1.0,) * 4
        samples.append(
            TrainSample(
                sample_id=str(i),
                input_ids=prompt + prompt,
                prompt_length=4,
                rl=zeros,
                ce=ones,
                distill=zeros,
                advantages=zeros,
                behaviour_logprobs=zeros,
                lag=(0,) * 4,
            )
        )
    return TrainBatch(
        version=WeightVersion(0, 0),
        minibatches=(tuple(samples),),
        rl_denominators=(0.0,),
        ce_denominators=(4.0 * count,),
        distill_denominators=(0.0,),
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("dtype", "stage"), [("float32", 0), ("float32", 2), ("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 3)]
)
def test_the_learner_learns_and_publishes_on_a_gpu(tiny: Path, recipe: Build, dtype: str, stage: int) -> None:
    """NCCL group of one, fused AdamW; the loss at the start is about log 64 = 4.2 and falls; buckets hold the trained dtype."""
    built = recipe(model={"path": str(tiny), "dtype": dtype}, trainer={"zero_stage": stage})
    learner = Learner(built, tiny, 0, 1)
    learner.begin_phase(schema.Optimizer(lr=3e-3), 200)
    losses = [float(learner.train(copy_task(step))["loss/ce"].value()) for step in range(80)]  # type: ignore[arg-type]
    assert losses[0] > 3.5 and sum(losses[-5:]) / 5 < 0.7 * losses[0]
    sizes = 0
    for bucket, data, crc32 in learner.buckets(1 << 18):
        check_bucket(bucket, data, crc32)
        assert all(tensor.dtype == dtype for tensor in bucket.tensors)
        sizes += bucket.nbytes
    assert sizes == sum(p.numel() for p in torch_parameters(tiny)) * (2 if dtype == "bfloat16" else 4)


def torch_parameters(path: Path) -> list[torch.nn.Parameter]:
    from transformers import AutoModelForCausalLM

    return list(AutoModelForCausalLM.from_pretrained(path).parameters())


@pytest.mark.usefixtures("alone")
def test_gpu_logprobs_are_the_cpus(tiny: Path, recipe: Build) -> None:
    """float32 on both: packed rows under CUDA's attention kernels against one unpacked sequence at a time on the CPU."""
    from transformers import AutoModelForCausalLM

    learner = Learner(recipe(), tiny, 0, 1)
    samples = list(copy_task(0, 16).minibatches[0])
    found = learner.logprobs(samples, "policy")
    policy = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    for sample, logprobs in zip(samples, found, strict=True):
        ids = torch.tensor([sample.input_ids])
        with torch.no_grad():
            expected = policy(ids).logits[0].log_softmax(-1)[3:-1].gather(-1, ids[0, 4:, None])[:, 0]
        assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-4)


def read_handle(plain: list[Any], queue: Any) -> None:
    queue.put(open_handle(plain, 0).float().sum().item())


def test_another_process_reads_the_same_gpu_memory() -> None:
    """0 + 1 + … + 1023 = 523,776, read through a handle of plain values; a write by the owner is seen, so it is no copy."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    tensor = torch.arange(1024, dtype=torch.float32, device="cuda")
    for expected in (523_776.0, 0.0):
        reader = context.Process(target=read_handle, args=(export_handle(tensor), queue))
        reader.start()
        assert queue.get(timeout=120) == expected
        reader.join(60)
        tensor.zero_()
        torch.cuda.synchronize()
