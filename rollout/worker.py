"""What runs inside vLLM's worker process: repairs of its CPU build, our weight-transfer engines, and the tap on drafts.

vLLM imports this module by the name of ``WorkerExtension`` before it loads the model.  ``WeightTransferEngine`` objects are
built after that, so registering ours at import is early enough.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import vllm
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.triton_utils.dispatcher import register_kernels

from slipstream.core.speculation import TestTimeSpeculation
from slipstream.rollout.cuda_ipc import open_handle
from slipstream.rollout.speculation.head_student import HeadStudent
from slipstream.rollout.speculation.lookahead import Lookahead
from slipstream.rollout.speculation.placement import placement_on
from slipstream.rollout.speculation.runner_v1 import RunnerV1
from slipstream.rollout.speculation.student import DraftModelStudent, Student
from slipstream.rollout.speculation.tap import Tap
from slipstream.rollout.speculation.updater import Updater

REPAIRED_VERSION = "0.32.0"


def repair_cpu_build() -> None:
    """Mend three faults of vLLM's CPU build.  Raises RuntimeError on a version that nobody has checked for them.

    1. ``expand_kernel`` divides speculative logits by uninitialised memory at temperature > 0 (vllm#55005).
    2. Linear weights are packed for oneDNN and then emptied, so that nothing can be loaded in place.
    3. A tied ``lm_head`` keeps the packed copy of the old embedding after an update.

    For 2 and 3 the plain weights stay (twice the weight memory, CPU only) and ``repack`` packs again after an update; this
    keeps oneDNN's speed, which switching it off would not.
    """
    if vllm.__version__ != REPAIRED_VERSION:
        raise RuntimeError(
            f"vLLM's CPU build is {vllm.__version__}; its faults were checked and mended for {REPAIRED_VERSION} only. "
            "Install the locked version, or run tests/rollout/test_repairs.py on yours and extend rollout/worker.py"
        )
    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})
    layer_utils.dispatch_cpu_unquantized_gemm = _dispatch_keeping_weight


def _expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat each request's value over its draft tokens: values ``[a, b]``, cumulated counts ``[2, 3]`` -> ``[a, a, b]``."""
    replaced = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    output.copy_(replaced.repeat_interleave(counts))


_dispatch: Callable[..., None] = layer_utils.dispatch_cpu_unquantized_gemm


def _dispatch_keeping_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    _dispatch(layer, remove_weight=False)


def repack(model: torch.nn.Module, *, but: Iterable[torch.nn.Module] = ()) -> None:
    """Pack every linear layer's weight for the CPU kernels again, tied heads included; those in ``but`` have not changed."""
    unchanged = {module for one in but for module in one.modules()}
    for module in model.modules():
        if (
            module not in unchanged
            and hasattr(module, "cpu_linear")
            and isinstance(getattr(module, "weight", None), torch.Tensor)
        ):
            _dispatch_keeping_weight(module, remove_weight=False)


@dataclass
class MappedInit(WeightTransferInitInfo):
    """Nothing to agree on: files are named per update."""


@dataclass
class MappedUpdate(WeightTransferUpdateInfo):
    """Safetensors files in shared memory, verified by the stager; together they hold every tensor of the model."""

    paths: list[str]


class MappedWeights(WeightTransferEngine[MappedInit, MappedUpdate]):
    """Copies memory-mapped safetensors into the running model's own parameters, without vLLM's layerwise reload."""

    init_info_cls = MappedInit
    update_info_cls = MappedUpdate

    def init_transfer_engine(self, init_info: MappedInit) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: MappedUpdate) -> None:
        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for path in update_info.paths:
                with safe_open(path, framework="pt") as bucket:
                    for name in bucket.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                        yield name, bucket.get_tensor(name)

        self.model.load_weights(tensors())

    def finish_weight_update(self) -> None:
        if current_platform.is_cpu():
            repack(self.model)

    def shutdown(self) -> None:
        pass


@dataclass
class IpcUpdate(WeightTransferUpdateInfo):
    """A handle per tensor (``cuda_ipc.export_handle``) into the memory of a learner on the same GPU."""

    names: list[str]
    handles: list[list[Any]]


class IpcWeights(WeightTransferEngine[MappedInit, IpcUpdate]):
    """vLLM's ``ipc`` engine with handles as plain values instead of pickles; like it, it loads by layerwise reload."""

    init_info_cls = MappedInit
    update_info_cls = IpcUpdate

    def init_transfer_engine(self, init_info: MappedInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: IpcUpdate) -> None:
        opened = (open_handle(handle, self.device.index) for handle in update_info.handles)
        self.model.load_weights(zip(update_info.names, opened, strict=True))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


if current_platform.is_cpu():
    repair_cpu_build()
for name, engine in {"mapped": MappedWeights, "plain_ipc": IpcWeights}.items():
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, engine)


def make_student(method: str, folder: Path, runner: RunnerV1, train: Literal["all", "body"], tokens: int) -> Student:
    """The trainable copy of the draft that ``runner`` has loaded from ``folder``."""
    borrowed, device, vocabulary = runner.borrowed(), runner.device, runner.vocabulary
    if method in ("eagle3", "dflash"):
        return HeadStudent(method, folder, device, train=train, borrowed=borrowed, vocabulary=vocabulary, tokens=tokens)  # type: ignore[arg-type]
    return DraftModelStudent(folder, device, train=train, frozen=borrowed.keys())


_OF_THE_OUTPUT_HEAD = ("lm_head.weight", "embed_tokens.weight")
"""Weights that it is packed from: its own, or those of the embedding that it is tied to."""


def make_updater(
    runner: RunnerV1, method: str, settings: dict[str, Any], folder: str, tokens: int, watched: int, state: str | None
) -> Updater:
    """What teaches the draft that ``runner`` has loaded from ``folder``; ``state`` is a folder of ``Updater.save``."""
    chosen = TestTimeSpeculation.model_validate_json(json.dumps(settings))
    student = make_student(method, Path(folder), runner, chosen.train, tokens)
    unchanged = [runner.target]
    head = runner.output_head
    if head is not None and not any(name.endswith(_OF_THE_OUTPUT_HEAD) for name, _ in student.weights()):
        unchanged.append(head)

    def publish(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        runner.draft.load_weights((name, weight.to(runner.dtype)) for name, weight in weights)
        if current_platform.is_cpu():
            repack(runner.draft, but=unchanged)

    updater = Updater(
        chosen,
        student,
        placement_on(runner.device),
        publish,
        lambda: runner.busy_s,
        tokens=tokens,
        max_length=runner.max_length,
        watched=watched,
    )
    if state is not None:
        updater.load(Path(state))
    return updater


class WorkerExtension:
    """Mixed into vLLM's worker.  Importing it brings the repairs and the engines above into that process; its methods are
    called by name (``Engine``), so they carry ours."""

    model_runner: Any
    use_v2_model_runner: bool

    def slipstream_watch_drafts(self, response_limit: int, most: int | None, learning: dict[str, Any] | None) -> bool:
        """Begin to count verdicts on drafts; False where nothing watches: on runner V2, and on a GPU where nothing of ours
        acts, since reading verdicts would make it wait every round.

        ``most``: the lookahead is chosen round by round, up to so many tokens.  ``learning``: ``method``,
        ``settings`` (``rollout.speculation.tts``), ``folder`` of the draft, ``tokens`` per round, ``watched`` of
        them by the watchdog, and ``state``, the folder of ``slipstream_save_draft`` to go on from.
        """
        if self.use_v2_model_runner:
            assert learning is None and most is None, "Engine.start pins model runner V1 for these"
            return False
        if not (current_platform.is_cpu() or learning or most):
            return False
        runner = RunnerV1(self.model_runner)
        updater = make_updater(runner, **learning) if learning else None
        self.slipstream_tap = Tap(runner, response_limit, updater, Lookahead(most) if most else None)
        if updater is not None:
            runner.measure()  # around everything that the tap does
        return True

    def slipstream_new_policy(self, batch: int, refilled: bool) -> None:
        """The target holds the weights of another batch from now on; ``refilled``: caches are filled anew."""
        self.slipstream_tap.new_policy(batch, refilled)

    def slipstream_save_draft(self, folder: str) -> None:
        """Write down a draft that learns, for ``state`` of a later start."""
        self.slipstream_tap.updater.save(Path(folder))

    def slipstream_lend_draft(self, file: str) -> int:
        """Write the learning draft's weights down for other engines; returns the draft tokens accepted since the last time."""
        return self.slipstream_tap.updater.lend(Path(file))

    def slipstream_adopt_draft(self, file: str) -> None:
        """Go on from an average of several engines' drafts."""
        self.slipstream_tap.updater.adopt(Path(file))

    def slipstream_draft_report(self) -> dict[str, Any]:
        """Counters since ``slipstream_watch_drafts``."""
        return self.slipstream_tap.report()

    def slipstream_target_sha256(self) -> str:
        """Over all parameters of the target, by name."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model_runner.get_model().named_parameters()):
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
