"""What a learner keeps on disk, in formats that hold data only: safetensors and JSON, no pickle.

===========================  ==============================================================================================
``model/``                   the policy as a Hugging Face folder, with tokenizer and generation config
``optimizer-*.safetensors``  ``exp_avg/<parameter>``, ``exp_avg_sq/<parameter>`` and, unless training is in float32,
                             ``master/<parameter>``: full float32 tensors, whatever the ZeRO stage and number of ranks were
``reference/``               the KL reference, where there is one (a teacher is read from its own folder again)
``critic/``                  the critic, where there is one: a Hugging Face folder for token classification with one label
``critic-optimizer-*``       its optimizer, like the policy's
``learner.json``             step counts, phase (optimizer section, total steps, epochs), random streams of every rank
===========================  ==============================================================================================
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.core import schema
from slipstream.trainer.checkpoint import CheckpointError
from slipstream.trainer.distributed import all_gathered, device
from slipstream.trainer.model import load_tokenizer
from slipstream.trainer.optim import MOMENTS, ShardedAdamW, StateKey
from slipstream.trainer.publisher import full_shape

if TYPE_CHECKING:
    from slipstream.trainer.learner import Learner

SHARD_BYTES = 2**30


def save(learner: Learner, folder: Path) -> None:
    """Collective; rank 0 writes.  Raises OSError (a full disk) on rank 0 only, once all ranks are through."""
    assert learner.phase is not None, "begin_phase comes before save"
    streams = all_gathered(_random_streams())
    weights = _weights(learner.policy)
    reference = _module(learner.reference) if learner.reference is not None else None
    frozen = _weights(reference) if reference is not None else {}
    shards = [_ShardWriter(folder, "optimizer")]
    _add_state(shards[0], learner.policy, learner.adamw, _keys(learner))
    critic, values = learner.critic, {}
    if critic is not None:
        values = _weights(critic.module)
        shards.append(_ShardWriter(folder, "critic-optimizer"))
        _add_state(shards[1], critic.module, critic.adamw, _keys(learner))
    if learner.rank != 0:
        return
    for writer in shards:
        writer.close()
    _write_model(learner.policy, weights, folder / "model")
    if critic is not None:
        _write_model(critic.module, values, folder / "critic")
        load_tokenizer(learner.model_path).save_pretrained(folder / "critic")
    load_tokenizer(learner.model_path).save_pretrained(folder / "model")
    if reference is not None:
        _write_model(reference, frozen, folder / "reference")
    phase = learner.phase
    content = {
        "steps": learner.adamw.steps,
        "phase": {
            "optimizer": phase.optimizer.model_dump(mode="json"),
            "total_steps": phase.total_steps,
            "epochs": phase.epochs,
        },
        "critic_steps": critic.adamw.steps if critic is not None else None,
        "random_streams": streams,
    }
    (folder / "learner.json").write_text(json.dumps(content))


def load(learner: Learner, folder: Path, total_steps: int | None = None) -> None:
    """Collective; every rank reads.  The random streams are restored where the number of ranks is the same.

    Raises CheckpointError for missing files, or tensors of another model.  Damage is for ``checkpoint.verify`` to find.
    """
    try:
        content = json.loads((folder / "learner.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: no readable learner.json ({error}); expected a folder that Learner.save wrote"
        ) from error
    phase = content["phase"]
    optimizer = schema.Optimizer.model_validate_json(json.dumps(phase["optimizer"]))
    learner.begin_phase(optimizer, total_steps or phase["total_steps"], phase["epochs"])
    weights = _Tensors(folder / "model", "*.safetensors")
    for name, parameter in learner.policy.named_parameters():
        value = weights.get(name, full_shape(parameter))
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value)
        if learner.recipe.model.dtype == "float32":
            learner.adamw.scatter(parameter, "master", value)
    _scatter_state(_Tensors(folder, "optimizer-*.safetensors"), learner.policy, learner.adamw, _keys(learner))
    learner.adamw.steps = content["steps"]
    if content["critic_steps"] is not None:
        learner.set_critic(folder / "critic")
        assert learner.critic is not None
        saved = _Tensors(folder, "critic-optimizer-*.safetensors")
        _scatter_state(saved, learner.critic.module, learner.critic.adamw, _keys(learner))
        learner.critic.adamw.steps = content["critic_steps"]
    if (folder / "reference").is_dir():
        learner.set_reference(folder / "reference")
    if len(content["random_streams"]) == learner.world_size:
        _restore_random_streams(content["random_streams"][learner.rank])


def _keys(learner: Learner) -> tuple[StateKey, ...]:
    """In float32 the master weights are the weights, bit for bit."""
    return MOMENTS if learner.recipe.model.dtype == "float32" else ("master", *MOMENTS)


def _add_state(shards: _ShardWriter, module: PreTrainedModel, adamw: ShardedAdamW, keys: tuple[StateKey, ...]) -> None:
    for name, parameter in module.named_parameters():
        for key in keys:
            tensor = adamw.gather(parameter, key)
            if tensor is not None:
                shards.add(f"{key}/{name}", tensor)


def _scatter_state(state: _Tensors, module: PreTrainedModel, adamw: ShardedAdamW, keys: tuple[StateKey, ...]) -> None:
    for name, parameter in module.named_parameters():
        for key in keys:
            adamw.scatter(parameter, key, state.get(f"{key}/{name}", full_shape(parameter)))


def _module(model: Any) -> PreTrainedModel:
    return model.module if isinstance(model, deepspeed.DeepSpeedEngine) else model


def _weights(module: PreTrainedModel) -> dict[str, Tensor]:
    """The full weights and persistent buffers in host memory, on rank 0; empty elsewhere."""
    weights: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if dist.get_rank() == 0:
                weights[name] = parameter.detach().to("cpu", copy=True)
    if dist.get_rank() == 0:
        kept = module.state_dict().keys()
        weights |= {name: buffer.detach().to("cpu", copy=True) for name, buffer in module.named_buffers() if name in kept}
    return weights


def _write_model(module: PreTrainedModel, weights: Mapping[str, Tensor], out: Path) -> None:
    with _disk_errors():
        module.save_pretrained(out, state_dict=dict(weights))


@contextmanager
def _disk_errors() -> Iterator[None]:
    """safetensors reports a full disk as its own error, with the operating system's number in the text."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error)) from error


class _ShardWriter:
    """Writes tensors to ``<stem>-00000.safetensors`` and so on as they come, a gigabyte at a time.

    A failure is kept until ``close``: raised in the middle, it would leave the other ranks waiting in a gather.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self._folder, self._stem = folder, stem
        self._pending: dict[str, Tensor] = {}
        self._written = 0
        self._error: OSError | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        self._pending[name] = tensor.cpu()
        if sum(t.nbytes for t in self._pending.values()) >= SHARD_BYTES:
            self._write()

    def close(self) -> None:
        """Write what is left.  Raises the first OSError of all writes."""
        self._write()
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        if self._pending and self._error is None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with _disk_errors():
                    save_file(self._pending, self._folder / f"{self._stem}-{self._written:05d}.safetensors")
            except OSError as error:
                self._error = error
        self._pending, self._written = {}, self._written + 1


class _Tensors:
    """Named tensors over several safetensors files, read one at a time."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob(pattern)):
            file = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._files:
            raise CheckpointError(f"{self._folder}: tensor {name!r} is missing; the checkpoint is of another model or dtype")
        tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self._folder}: tensor {name!r} is {tuple(tensor.shape)}, expected {shape}")
        return tensor.to(device())


def _random_streams() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    streams = {"torch": torch.get_rng_state()}
    if device().type == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state()
    encoded = {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in streams.items()}
    return {"python": [version, list(words), gauss], **encoded}


def _restore_random_streams(streams: Mapping[str, Any]) -> None:
    version, words, gauss = streams["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_bytes(streams["torch"]))
    if device().type == "cuda" and "cuda" in streams:
        torch.cuda.set_rng_state(_bytes(streams["cuda"]))


def _bytes(encoded: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)
