"""The Ray actors: thin shells that put an engine or a learner rank into a process of its own."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import ray

from slipstream.core.environment import ENVIRONMENT
from slipstream.core.metrics import Metrics
from slipstream.core.records import Group, Task, TrainBatch, TrainSample, WeightVersion
from slipstream.core.schema import Optimizer, Recipe
from slipstream.core.weights import Bucket, TensorSpec

if TYPE_CHECKING:
    from slipstream.rollout.engine import CommitTimes
    from slipstream.rollout.speculation.acceptance import DraftStats
    from slipstream.rollout.speculation.sharing import DraftShare
    from slipstream.rollout.weights import TransportName


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run lives: a name for its shared memory, its folder for logs, and where user functions may stand."""

    run_id: str
    logs: str
    search_path: str


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine's start: sampled tokens, seconds with at least one request inside vLLM, drafts' verdicts."""

    sampled_tokens: int
    busy_s: float
    drafts: DraftStats | None = None


def spawn(actor_class: Any, count: int, *, cpus: float, gpus: float) -> list[Any]:
    """Actors in processes of their own; a dead one stays dead, for whoever supervises it to tell."""
    options = actor_class.options(num_cpus=cpus, num_gpus=gpus, runtime_env={"env_vars": ENVIRONMENT}, max_restarts=0)
    return [options.remote() for _ in range(count)]


@contextlib.asynccontextmanager
async def starting(what: str, logs: str, timeout_s: float) -> AsyncIterator[None]:
    """Bounds and explains a start.  Raises TimeoutError after ``timeout_s``; whatever else fails gets a note."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise TimeoutError(
            f"{what} did not start within cluster.start_timeout_s = {timeout_s} s; see {logs}, or whether the cluster has "
            "room for it"
        ) from None
    except Exception as problem:
        problem.add_note(f"while {what} started; see {logs}")
        raise


@ray.remote(max_concurrency=100_000)
class RolloutActor:
    """One engine, its grader and its share of the weight traffic.  Its methods run side by side on one event loop."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()

    async def start(
        self,
        recipe: Recipe,
        model_path: Path,
        index: int,
        place: RunPlace,
        version: WeightVersion,
        first_task: Task,
        transport: TransportName,
        draft_path: Path | None,
        draft_state: Path | None,
    ) -> str:
        """Load everything; returns the id of the node, since weights are staged once per node.

        Raises UserError where a reward function or the environment cannot be imported, or ``first_task`` lacks what they need.
        """
        redirect_output(Path(place.logs) / f"engine-{index}.log")
        from slipstream.rollout.engine import Engine
        from slipstream.rollout.environment import Limits
        from slipstream.rollout.environments import Environments
        from slipstream.rollout.groups import GroupSampler
        from slipstream.rollout.prompts import PromptEncoder
        from slipstream.rollout.rewards import Rewards
        from slipstream.rollout.weights import Stager
        from slipstream.trainer.model import context_limit, eos_token_ids, load_tokenizer, vocabulary_size

        self._rewards = Rewards(recipe.reward, Path(place.search_path))
        self._open.callback(self._rewards.close)
        await self._rewards.start(first_task)
        environments = Environments(recipe.rollout.environment, Path(place.search_path))
        environments.check(first_task)
        encoder = PromptEncoder(load_tokenizer(model_path), chat=recipe.data.chat)
        if recipe.rollout.environment.name != "single_turn":
            encoder.observation(first_task, "?", ())  # or a chat template that cannot go on fails here
        limit = context_limit(recipe.model, model_path)
        self._engine = await Engine.start(
            model_path,
            model=recipe.model,
            rollout=recipe.rollout,
            max_length=limit,
            eos_ids=eos_token_ids(model_path),
            seed=(recipe.seed * 1_000_003 + version.attempt * 1009 + index) % 2**31,
            version=version,
            transport=transport,
            kv_on_update=recipe.schedule.kv_on_update,
            draft_path=draft_path,
            draft_state=draft_state,
        )
        self._open.callback(self._engine.shutdown)
        sampling = recipe.rollout.sampling
        self._groups = GroupSampler(
            self._engine,
            encoder,
            environments,
            self._rewards,
            seed=recipe.seed if sampling.seeded else None,
            limits=Limits(
                max_tokens=sampling.max_tokens,
                max_turns=recipe.rollout.environment.max_turns,
                max_length=limit,
                vocabulary=vocabulary_size(model_path),
            ),
        )
        self._stager = Stager(place.run_id)
        self._open.callback(self._stager.close)
        return ray.get_runtime_context().get_node_id()

    async def sample(self, task: Task, prompt_ids: tuple[int, ...], dispatched: WeightVersion, size: int) -> Group:
        return await self._groups.sample(task, prompt_ids, dispatched, size)

    async def abort_before(self, oldest: WeightVersion, group_ids: list[str]) -> None:
        self._groups.abort_before(oldest, group_ids)

    async def stage(self, version: str, bucket: Bucket, data: np.ndarray, crc32: int) -> None:
        """Lay one bucket into this node's shared memory, beside the generation (on a thread)."""
        await asyncio.to_thread(self._stager.put, version, bucket, data, crc32)

    async def complete(self, version: str, buckets: int) -> Any:
        return self._stager.complete(version, buckets)

    async def connect(self, init_info: dict[str, Any]) -> None:
        await self._engine.connect(init_info)

    async def commit(self, version: WeightVersion, update: dict[str, Any]) -> CommitTimes:
        return await self._engine.commit(version, update)

    async def discard(self, version: str) -> None:
        self._stager.discard(version)

    async def stats(self) -> EngineStats:
        return EngineStats(self._engine.sampled_tokens, self._engine.busy_s, await self._engine.drafts())

    async def save_draft(self, folder: Path) -> None:
        await self._engine.save_draft(folder)

    async def lend_draft(self) -> DraftShare:
        """The weights of this engine's draft, for averaging."""
        from safetensors.numpy import load_file

        with self._stager.scratch("lent-draft") as file:
            accepted = await self._engine.lend_draft(file)
            return await asyncio.to_thread(load_file, file), accepted

    async def average_drafts(self, *shares: DraftShare) -> dict[str, np.ndarray] | None:
        from slipstream.rollout.speculation.sharing import average

        return await asyncio.to_thread(average, shares)

    async def adopt_draft(self, weights: dict[str, np.ndarray] | None) -> None:
        """Let this engine's draft go on from an average; None, where there was nothing to average, changes nothing."""
        from safetensors.numpy import save_file

        if weights is not None:
            with self._stager.scratch("adopted-draft") as file:
                await asyncio.to_thread(save_file, weights, file)
                await self._engine.adopt_draft(file)

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def stop(self) -> None:
        """Close what has been opened, the last first."""
        self._open.close()

    async def pid(self) -> int:
        return os.getpid()


@ray.remote
class LearnerActor:
    """One rank of the learner.  Calls run one after the other, so a publication always ends before the next step."""

    def address(self) -> tuple[str, int]:
        """Where rank 0 will listen: this node's address and a port that is free now."""
        from slipstream.trainer.distributed import free_port

        return ray.util.get_node_ip_address(), free_port()

    def start(self, recipe: Recipe, model_path: Path, rank: int, place: RunPlace, address: tuple[str, int]) -> None:
        redirect_output(Path(place.logs) / f"learner-{rank}.log")
        from slipstream.trainer.distributed import join
        from slipstream.trainer.learner import Learner

        join(rank, recipe.trainer.ranks, *address, timeout_s=recipe.cluster.step_timeout_s)
        self._rank = rank
        self._bucket_bytes = int(recipe.trainer.bucket_mib * 2**20)
        self._learner = Learner(recipe, model_path, rank, recipe.trainer.ranks)

    def begin_phase(self, optimizer: Optimizer, total_steps: int, epochs: int | None) -> None:
        self._learner.begin_phase(optimizer, total_steps, epochs)

    def set_reference(self, path: Path | None) -> None:
        self._learner.set_reference(path)

    def train(self, batch: TrainBatch) -> Metrics:
        return self._learner.train(batch)

    def set_critic(self, path: Path | None) -> None:
        self._learner.set_critic(path)

    def set_teacher(self, path: Path) -> None:
        self._learner.set_teacher(path)

    def logprobs(self, samples: list[TrainSample], which: Literal["reference", "teacher"]) -> list[list[float]]:
        return self._learner.logprobs(samples, which)

    def publish(self) -> Iterator[tuple[Bucket, np.ndarray, int]]:
        """The weights as buckets, one at a time; ranks other than 0 take part in the gathers and yield nothing."""
        yield from self._learner.buckets(self._bucket_bytes)

    def engine_specs(self) -> list[TensorSpec]:
        return self._learner.engine_specs()

    def nccl_connect(self, address: tuple[str, int], world_size: int) -> None:
        from slipstream.rollout.nccl import NcclSender

        self._sender = NcclSender(address, world_size)

    def nccl_broadcast(self) -> None:
        """Send every tensor, in the order of ``engine_specs``; ranks other than 0 take part in the gathers."""
        tensors = self._learner.engine_tensors(self._bucket_bytes)
        if self._rank == 0:
            self._sender.broadcast(tensors)
        else:
            collections.deque(tensors, maxlen=0)

    def ipc_export(self) -> list[list[Any]]:
        """CUDA handles to a copy of every tensor, which lives until ``ipc_release``: the next step may not change it."""
        from slipstream.rollout.cuda_ipc import export_handle

        self._shared = [tensor.clone() for _, tensor in self._learner.engine_tensors(self._bucket_bytes) if self._rank == 0]
        return [export_handle(tensor) for tensor in self._shared]

    def ipc_release(self) -> None:
        self._shared = []

    def save(self, folder: str) -> None:
        self._learner.save(Path(folder))

    def load(self, folder: str, total_steps: int) -> None:
        self._learner.load(Path(folder), total_steps)

    def pid(self) -> int:
        return os.getpid()


def redirect_output(path: Path) -> None:
    """Send this process's output, and that of the processes it starts, to ``path``; elsewhere it stays in Ray's own logs.

    A node that does not share the run's directory has no such folder, and then nothing changes.
    """
    if not path.parent.is_dir():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
