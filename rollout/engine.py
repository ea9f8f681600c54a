"""One vLLM engine that keeps generating while its weights change."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from slipstream.core.records import NO_DRAFTS, DraftCounts, VersionSpan, WeightVersion, versions_of
from slipstream.core.schema import KvOnUpdate, Model, Rollout
from slipstream.rollout.environment import Completion
from slipstream.rollout.speculation.acceptance import Acceptance, DraftStats, Learning
from slipstream.rollout.speculation.checks import require_runnable
from slipstream.rollout.speculation.options import speculative_config
from slipstream.rollout.weights import TransportName

T = TypeVar("T")

IN_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""vLLM's executor whose worker lives in the engine core.  On CPU vLLM replaces its short name, ``uni``, by a worker process,
because only there can it bind OpenMP threads.  Our processes get their number of threads from outside; a third import of vLLM,
and a core that spins while the worker computes, cost more (docs/LOG.md)."""


class EngineFailed(RuntimeError):
    """The engine is dead, or was killed because a commit failed half-way.  It cannot be used again."""


@dataclass(frozen=True, slots=True)
class CommitTimes:
    """Seconds of one commit: ``pause_s`` is how long no token was generated, ``load_s`` the part that moved weights."""

    pause_s: float
    load_s: float


class Engine:
    """Samples completions (``rollout.environment.Sampler``) and takes new weights in flight.

    At most ``max_num_seqs`` requests are inside vLLM, so none waits there with an old salt; each is admitted under the version
    of that moment, which salts its prefix cache: blocks of old weights are never served to a new request.  No request is added
    during a commit.

    ``kv_on_update: keep`` leaves running requests their KV entries, so a token may attend to entries of any version since its
    request was admitted, and ``kv_versions`` says the version of the admission.  vLLM may preempt a request for want of
    memory and fill its cache again under newer weights: then the entries are newer than that, never older.  With ``recompute``
    every commit drops all entries, so that each token attends only to those of the weights that sample it.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        rollout: Rollout,
        eos_ids: Sequence[int],
        version: WeightVersion,
        kv_on_update: KvOnUpdate = "keep",
    ) -> None:
        self._llm = llm
        self._recompute = kv_on_update == "recompute"
        self._sampling = rollout.sampling
        self._eos_ids = frozenset(eos_ids)
        self._slots = asyncio.Semaphore(rollout.max_num_seqs)
        self._admission = asyncio.Lock()
        self._failure: BaseException | None = None
        self._busy_since: float | None = None
        self._busy_s = 0.0
        self.version = version
        self.admitted: dict[str, WeightVersion] = {}
        self._written: dict[str, Any] = {}
        self._ended_tokens = 0
        self._speculation = rollout.speculation
        self._watched = False
        self._acceptance = Acceptance((0,) * (rollout.speculation.tokens + 1))

    @classmethod
    async def start(
        cls,
        model_path: Path,
        *,
        model: Model,
        rollout: Rollout,
        max_length: int,
        eos_ids: Sequence[int],
        seed: int,
        version: WeightVersion,
        transport: TransportName = "mapped",
        kv_on_update: KvOnUpdate = "keep",
        draft_path: Path | None = None,
        draft_state: Path | None = None,
    ) -> Engine:
        """Load the model and label its weights ``version``.  Engines of one run get different seeds.

        ``draft_path`` is the folder that ``rollout.speculation.draft`` means, ``draft_state`` what ``save_draft`` wrote of a
        draft that learns.  Raises UserError if the draft does not fit.
        """
        on_gpu = torch.cuda.is_available()
        require_runnable(rollout.speculation, model_path, draft_path, on_gpu=on_gpu, max_length=max_length)
        arguments = engine_args(model_path, model, rollout, max_length, seed, transport)
        arguments.speculative_config = speculative_config(rollout.speculation, draft_path, rollout.tensor_parallel)
        if rollout.speculation.tapped:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the taps stand on runner V1
            arguments.async_scheduling = False  # or the host's token ids are placeholders when a verdict falls
        llm = AsyncLLM.from_engine_args(arguments)
        engine = cls(llm, rollout, eos_ids, version, kv_on_update)
        if rollout.speculation.on:
            await engine._watch_drafts(draft_path, draft_state)
        if transport != "nccl":  # NCCL meets the learner in ``connect``
            await engine.connect({})
        await llm.update_weight_version(str(version))
        gc.collect()
        gc.freeze()  # what has been loaded stays; every full collection would walk it again, for half a second
        return engine

    async def _watch_drafts(self, draft_path: Path | None, draft_state: Path | None) -> None:
        speculation, learning = self._speculation, None
        if speculation.learns:
            learning = {
                "method": speculation.method,
                "settings": speculation.tts.model_dump(mode="json"),
                "folder": str(draft_path),
                "tokens": speculation.tokens,
                "watched": speculation.tokens if speculation.steady else 1,
                "state": str(draft_state) if draft_state is not None else None,
            }
        most = speculation.tokens if speculation.lookahead == "dynamic" else None
        arguments = (self._sampling.max_tokens, most, learning)
        watching = await self._llm.collective_rpc("slipstream_watch_drafts", args=arguments)
        self._watched = all(watching)

    async def connect(self, init_info: dict[str, Any]) -> None:
        """Prepare the transport; for NCCL this meets the learner, and returns when both have."""
        await self._guard(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))

    async def sample(
        self, prompt_ids: tuple[int, ...], *, request_id: str, seed: int | None = None, max_tokens: int | None = None
    ) -> Completion:
        """One response.  ``seed`` fixes the request's own random stream; without it the engine's stream is used.

        Raises EngineFailed when the engine is dead.  Cancelling the call aborts the request.
        """
        params = self._params(seed, min(max_tokens or self._sampling.max_tokens, self._sampling.max_tokens))
        async with self._slots:
            collector = await self._admit(prompt_ids, request_id, params)
            try:
                output = await self._guard(collector.get())
                while not output.finished:
                    output = await self._guard(collector.get())
            except asyncio.CancelledError:
                if response := self._written.pop(request_id, None):
                    self._ended_tokens += response.num_output_tokens()
                await self._llm.abort(collector.request_id, internal=True)
                raise
            finally:
                admitted = self._release(request_id)
        self._ended_tokens += len(output.outputs[0].token_ids)
        return self._completion(output.outputs[0], admitted)

    async def drafts(self) -> DraftStats | None:
        """Counters since the start; None without speculation.  Raises EngineFailed if the draft could not be taught."""
        if not self._speculation.on:
            return None
        if not self._watched:
            return DraftStats(self._acceptance)
        report = (await self._guard(self._llm.collective_rpc("slipstream_draft_report")))[0]
        acceptance = replace(
            self._acceptance,
            rounds_by_quarter=tuple(report["rounds_by_quarter"]),
            accepted_by_quarter=tuple(report["accepted_by_quarter"]),
        )
        learning = report["learning"]
        if learning is None:
            return DraftStats(acceptance)
        if learning["refused"]:
            self.kill(EngineFailed(learning["refused"]))
            raise EngineFailed(learning["refused"])
        return DraftStats(acceptance, Learning(**{name: learning[name] for name in Learning.__slots__}))

    async def save_draft(self, folder: Path) -> None:
        """Write down a draft that learns: its weights, moments and figures."""
        self._check_alive()
        await self._guard(self._llm.collective_rpc("slipstream_save_draft", args=(str(folder),)))

    async def lend_draft(self, file: Path) -> int:
        """Write the weights of a draft that learns to ``file``; returns the draft tokens accepted since the last time."""
        self._check_alive()
        return (await self._guard(self._llm.collective_rpc("slipstream_lend_draft", args=(str(file),))))[0]

    async def adopt_draft(self, file: Path) -> None:
        """Let the draft go on from the weights in ``file``, between two rounds."""
        self._check_alive()
        await self._guard(self._llm.collective_rpc("slipstream_adopt_draft", args=(str(file),)))

    async def _admit(self, prompt_ids: tuple[int, ...], request_id: str, params: SamplingParams) -> Any:
        async with self._admission:
            self._check_alive()
            prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": str(self.version)}
            collector = await self._guard(self._llm.add_request(request_id, prompt, params))  # type: ignore[arg-type]
            self.admitted[request_id] = self.version
            if state := self._llm.output_processor.request_states.get(collector.request_id):  # None: it has ended already
                self._written[request_id] = state.detokenizer
            self._busy_since = self._busy_since or time.perf_counter()
            return collector

    def _release(self, request_id: str) -> WeightVersion:
        admitted = self.admitted.pop(request_id)
        self._written.pop(request_id, None)
        if not self.admitted and self._busy_since is not None:
            self._busy_s += time.perf_counter() - self._busy_since
            self._busy_since = None
        return admitted

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled since the start, those of running and of aborted requests included."""
        return self._ended_tokens + sum(response.num_output_tokens() for response in self._written.values())

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request inside vLLM, since the start."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self._busy_since is not None else 0.0)

    def _params(self, seed: int | None, max_tokens: int) -> SamplingParams:
        stop = list(self._sampling.stop)
        return SamplingParams(
            temperature=self._sampling.temperature,
            max_tokens=max_tokens,
            stop=stop or None,
            stop_token_ids=sorted(self._eos_ids),
            detokenize=bool(stop),
            include_stop_str_in_output=True,  # the text is what the token ids spell
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, output: CompletionOutput, admitted: WeightVersion) -> Completion:
        token_ids = tuple(output.token_ids)
        assert output.weight_versions is not None and output.logprobs is not None
        spans = [VersionSpan(WeightVersion.parse(s.version), s.start, s.end) for s in output.weight_versions]
        if output.finish_reason == "stop":
            finish = "eos" if token_ids and token_ids[-1] in self._eos_ids else "stop"
        else:
            finish = "length" if output.finish_reason == "length" else "aborted"
        versions = versions_of(spans, len(token_ids))
        return Completion(
            token_ids=token_ids,
            logprobs=tuple(output.logprobs.logprobs),  # type: ignore[union-attr]
            versions=versions,
            kv_versions=versions if self._recompute else (admitted,) * len(token_ids),
            finish=finish,  # type: ignore[arg-type]
            text=output.text,
            draft=self._count(output),
        )

    def _count(self, output: CompletionOutput) -> DraftCounts:
        """Take what vLLM counted of a response over into the engine's own counters."""
        counted = output.spec_decode_metrics
        if counted is None:
            return NO_DRAFTS
        found = Acceptance(tuple(counted.histogram), counted.num_draft_tokens)
        self._acceptance = self._acceptance.plus(found)
        return DraftCounts(found.rounds, found.drafted, found.accepted)

    async def commit(self, version: WeightVersion, update: dict[str, Any]) -> CommitTimes:
        """Pause, load what ``update`` points to, label it, resume; running requests keep their KV cache, or fill it anew.

        ``clear_cache`` preempts all running requests and empties the prefix cache; they go on from the tokens they have.
        Any failure kills the engine and raises EngineFailed: it never resumes on torn weights.
        """
        async with self._admission:
            self._check_alive()
            try:
                start = time.perf_counter()
                # The engine core's own call: AsyncLLM.pause_generation sleeps 20 ms after it, for the order of events only.
                await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=self._recompute)
                loading = time.perf_counter()
                await self._llm.start_weight_update()
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
                await self._llm.finish_weight_update(weight_version=str(version))
                if self._speculation.learns:
                    await self._llm.collective_rpc("slipstream_new_policy", args=(version.batch, self._recompute))
                loaded = time.perf_counter()
                await self._llm.resume_generation()
            except BaseException as error:
                self.kill(error)
                raise EngineFailed(f"commit of {version} failed ({error!r}); the engine was stopped") from error
            self.version = version
            return CommitTimes(pause_s=time.perf_counter() - start, load_s=loaded - loading)

    async def check_health(self) -> None:
        """Raises EngineFailed if vLLM's core process has died."""
        self._check_alive()
        await self._guard(self._llm.check_health())

    def kill(self, reason: BaseException) -> None:
        """Stop for good; every later call raises EngineFailed with ``reason``."""
        if self._failure is None:
            self._failure = reason
            self._llm.shutdown()

    def shutdown(self) -> None:
        self.kill(RuntimeError("shut down"))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(f"the engine has stopped: {self._failure!r}") from self._failure

    async def _guard(self, call: Awaitable[T]) -> T:
        """Turn vLLM's own errors of a dead core into EngineFailed, once and for all later calls."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call
        except EngineDeadError as error:
            self._failure = self._failure or error
            raise EngineFailed("vLLM's engine core has died; its log says why") from error


def engine_args(
    model_path: Path, model: Model, rollout: Rollout, max_length: int, seed: int, transport: TransportName
) -> AsyncEngineArgs:
    """vLLM's arguments.  The device decides what memory setting applies; ``processed_logprobs`` are those of the sampler."""
    on_gpu = torch.cuda.is_available()
    memory: dict[str, Any] = (
        {"gpu_memory_utilization": rollout.gpu_memory_utilization}
        if on_gpu
        else {"kv_cache_memory_bytes": int(rollout.kv_cache_gib * 2**30)}
    )
    return AsyncEngineArgs(
        model=str(model_path),
        dtype=model.dtype,
        max_model_len=max_length,
        max_num_seqs=rollout.max_num_seqs,
        tensor_parallel_size=rollout.tensor_parallel,
        distributed_executor_backend=None if on_gpu or rollout.tensor_parallel > 1 else IN_CORE,
        enforce_eager=rollout.enforce_eager,
        enable_prefix_caching=rollout.prefix_caching,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        seed=seed,
        disable_log_stats=True,
        per_request_spec_decode_metrics="summary" if rollout.speculation.on else "none",
        worker_extension_cls="slipstream.rollout.worker.WorkerExtension",
        weight_transfer_config=WeightTransferConfig(backend=transport),
        **memory,
    )
