"""Staging: what arrives is what was sent, or an error says what is wrong; handles and transports without a GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.core.weights import Bucket, TensorSpec, checksum, plan_buckets
from slipstream.rollout.cuda_ipc import decode, encode
from slipstream.rollout.weights import Stager, choose_transport, nccl_update

SPECS = (TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", (4,)), TensorSpec("c", "int64", (1,)))


def flat(bucket: Bucket, fill: int = 0) -> np.ndarray:
    return np.arange(fill, fill + bucket.nbytes, dtype=np.uint8)


def test_buckets_are_cut_in_order_and_a_large_tensor_stands_alone() -> None:
    """Sizes 24, 8, 8 bytes.  Buckets of 16: the first is over it alone, the other two fit together at (0, 8), (8, 16)."""
    plan = plan_buckets(SPECS, 16)
    assert [[t.name for t in b.tensors] for b in plan] == [["a"], ["b", "c"]]
    assert plan[1].offsets() == [(0, 8), (8, 16)] and plan[1].nbytes == 16
    with pytest.raises(ValueError, match="'a' occurs twice"):
        plan_buckets([*SPECS, SPECS[0]], 16)
    with pytest.raises(ValueError, match="bucket_bytes: got 0"):
        plan_buckets(SPECS, 0)


def test_staged_files_hold_the_tensors_that_were_sent(tmp_path: Path) -> None:
    stager = Stager("t", tmp_path)
    a = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    b = torch.tensor([1.5, -2.0, 0.0, 3.0], dtype=torch.bfloat16)
    c = torch.tensor([7])
    (bucket,) = plan_buckets(SPECS, 1000)
    data = torch.cat([t.flatten().view(torch.uint8) for t in (a, b, c)]).numpy()
    stager.put("0.1", bucket, data, checksum(data))
    staged = stager.complete("0.1", 1)
    loaded = load_file(staged.paths[0])
    assert staged.nbytes == 40
    assert torch.equal(loaded["a"], a) and torch.equal(loaded["b"], b) and torch.equal(loaded["c"], c)
    assert loaded["b"].dtype == torch.bfloat16
    stager.discard("0.1")
    assert not Path(staged.paths[0]).exists()


def test_torn_repeated_and_missing_buckets_are_named(tmp_path: Path) -> None:
    stager = Stager("t", tmp_path)
    first, second = plan_buckets(SPECS, 16)
    good = flat(first)
    with pytest.raises(ValueError, match="bucket 0: checksum"):
        stager.put("0.1", first, good, checksum(good) ^ 1)
    with pytest.raises(ValueError, match="bucket 0: got 16 bytes, expected 24"):
        stager.put("0.1", first, flat(second), 0)
    stager.put("0.1", first, good, checksum(good))
    with pytest.raises(ValueError, match="bucket 0 arrived twice"):
        stager.put("0.1", first, good, checksum(good))
    with pytest.raises(ValueError, match=r"got 1 of 2 buckets, missing \[1\]"):
        stager.complete("0.1", 2)
    stager.close()
    assert not list(tmp_path.iterdir()), "a closed stager leaves memory behind"


def test_the_transport_follows_the_gpus() -> None:
    assert choose_transport(gpus=0, wanted=2) == "mapped"
    assert choose_transport(gpus=2, wanted=2) == "nccl"
    assert choose_transport(gpus=1, wanted=2) == "plain_ipc"
    assert choose_transport(gpus=2, wanted=4) == "mapped"


def test_nccl_is_told_names_types_and_shapes_in_order() -> None:
    assert nccl_update(SPECS) == {
        "names": ["a", "b", "c"],
        "dtype_names": ["float32", "bfloat16", "int64"],
        "shapes": [[2, 3], [4], [1]],
    }


def test_a_cuda_handle_is_plain_values_and_comes_back() -> None:
    """The layout of torch.multiprocessing.reductions.reduce_tensor for a CUDA tensor, with made-up memory handles."""
    arguments = (
        torch.Tensor, torch.Size([2, 3]), (3, 1), 0, torch.storage.UntypedStorage, torch.bfloat16, 0, b"memory", 512, 0,
        False, b"counter", 0, b"event", True,
    )  # fmt: skip
    plain = encode(arguments)
    assert all(isinstance(v, int | bytes | bool | str | list | None) for v in plain)
    assert decode(plain, 3) == (*arguments[:6], 3, *arguments[7:])
    with pytest.raises(ValueError, match="argument 0 is 'x'"):
        encode(("x", *arguments[1:]))
