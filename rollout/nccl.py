"""The sending end of vLLM's NCCL weight transfer, for the process of the learner's rank 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer


class NcclSender:
    """Rank 0 of a group whose other ranks are the engines' workers.  Returns from its constructor when all have met."""

    def __init__(self, address: tuple[str, int], world_size: int) -> None:
        info = NCCLTrainerInitInfo(master_address=address[0], master_port=address[1], world_size=world_size)
        self._group = trainer_init(info)

    def broadcast(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send every tensor, packed; the engines must be told the same names in the same order (``weights.nccl_update``)."""
        packed_nccl_broadcast_producer(tensors, self._group, src=0, post_iter_func=lambda item: item[1])
