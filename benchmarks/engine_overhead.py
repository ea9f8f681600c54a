"""What our rollout path costs beside a bare loop over vLLM.

tokens_ratio               tokens/s of Engine + GroupSampler + Rewards (groups of 8, graded, with versions) divided by
                           asyncio.gather over AsyncLLM.generate(); the same AsyncLLM, prompts and sampling, in turns
tokens_ratio_short         the same at 8 tokens per response at most, where the cost of a sample weighs most
tokens_ratio_through_ray   the same path behind a RolloutActor, called from a driver, divided by the bare loop
cpu_ms_per_sample_*        CPU time of the process that holds the AsyncLLM (for `ray`: of the driver)
seeded_ratio               our path with a random stream of its own for every sample, divided by the one without
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import ROOT, WORK, arguments, finish, prepare_environment, say

from slipstream.core.recipe import load_recipe
from slipstream.core.records import Task, WeightVersion
from slipstream.core.schema import Recipe

GROUP_SIZE = 8
VERSION = WeightVersion(0, 0)
Prompts = list[tuple[Task, tuple[int, ...]]]
Numbers = dict[str, list[float]]
Round = Callable[[int], Awaitable[int]]
"""Runs every prompt once, with ids of its own from the given number, and returns how many tokens were sampled."""


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    run: Round


def recipe_of(groups: int) -> Recipe:
    overrides = [
        f"data.options={{size: {groups}, demonstrations: none}}",
        "rollout.sampling.max_tokens=32",
        "monitor.eval.size=0",
        "warm_start=null",
    ]
    return load_recipe([ROOT / "recipes" / "quickstart.yaml"], overrides)


def prompts_of(recipe: Recipe, model: Path) -> Prompts:
    from slipstream.rollout.prompts import PromptEncoder
    from slipstream.rollout.tasks import open_source
    from slipstream.trainer.model import load_tokenizer

    source = open_source(recipe.data, recipe.seed, "train", recipe.monitor.eval)
    encoder = PromptEncoder(load_tokenizer(model))
    tasks = [source.task(0, position) for position in range(len(source))]
    return [(task, encoder.encode(task)) for task in tasks]


def renamed(task: Task, number: int) -> Task:
    return replace(task, id=f"{number}/{task.id}")


async def sides_of(recipe: Recipe, model: Path, prompts: Prompts) -> tuple[list[Side], Callable[[], None]]:
    """Every side on one AsyncLLM but the one behind Ray, and how to stop it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from slipstream.rollout.engine import Engine, engine_args
    from slipstream.rollout.environment import Limits
    from slipstream.rollout.environments import Environments
    from slipstream.rollout.groups import GroupSampler
    from slipstream.rollout.prompts import PromptEncoder
    from slipstream.rollout.rewards import Rewards
    from slipstream.trainer.model import eos_token_ids, load_tokenizer, vocabulary_size

    max_length, eos_ids = recipe.model.max_length or 64, eos_token_ids(model)
    llm = AsyncLLM.from_engine_args(engine_args(model, recipe.model, recipe.rollout, max_length, 0, "mapped"))
    engine = Engine(llm, recipe.rollout, eos_ids, VERSION)
    await llm.update_weight_version(str(VERSION))
    gc.collect()
    gc.freeze()  # as Engine.start does
    encoder, rewards = PromptEncoder(load_tokenizer(model)), Rewards(recipe.reward)
    environments = Environments(recipe.rollout.environment)

    def ours(max_tokens: int, seed: int | None = None) -> Round:
        limits = Limits(max_tokens=max_tokens, max_turns=1, max_length=max_length, vocabulary=vocabulary_size(model))
        sampler = GroupSampler(engine, encoder, environments, rewards, seed=seed, limits=limits)

        async def run(number: int) -> int:
            groups = await asyncio.gather(*(sampler.sample(renamed(t, number), p, VERSION, GROUP_SIZE) for t, p in prompts))
            return sum(len(t.token_ids) for group in groups for t in group.trajectories)

        return run

    def bare(max_tokens: int) -> Round:
        params = SamplingParams(
            temperature=recipe.rollout.sampling.temperature,
            max_tokens=max_tokens,
            stop_token_ids=sorted(eos_ids),
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        async def one(prompt_ids: Sequence[int], request_id: str) -> int:
            prompt: Any = {"prompt_token_ids": list(prompt_ids)}
            return sum([len(o.outputs[0].token_ids) async for o in llm.generate(prompt, params, request_id)])

        async def run(number: int) -> int:
            ids = [(p, f"{number}/{t.id}#{i}") for t, p in prompts for i in range(GROUP_SIZE)]
            return sum(await asyncio.gather(*(one(prompt_ids, request_id) for prompt_ids, request_id in ids)))

        return run

    long = recipe.rollout.sampling.max_tokens
    sides = [Side("bare", bare(long)), Side("ours", ours(long)), Side("seeded", ours(long, 0))]
    return [*sides, Side("bare_short", bare(8)), Side("ours_short", ours(8))], engine.shutdown


async def ray_side(recipe: Recipe, model: Path, prompts: Prompts) -> Side:
    from slipstream.cluster.actors import RolloutActor, RunPlace
    from slipstream.core.environment import ENVIRONMENT

    actor = RolloutActor.options(runtime_env={"env_vars": ENVIRONMENT}).remote()
    place = RunPlace("engine-overhead", str(WORK / "engine-overhead-logs"), str(ROOT))
    await actor.start.remote(recipe, str(model), 0, place, VERSION, prompts[0][0], "mapped")

    async def run(number: int) -> int:
        calls = [actor.sample.remote(renamed(task, number), prompt_ids, VERSION, GROUP_SIZE) for task, prompt_ids in prompts]
        return sum(len(t.token_ids) for group in await asyncio.gather(*calls) for t in group.trajectories)

    return Side("ray", run)


async def measure(sides: Sequence[Side], repetitions: int, samples: int) -> tuple[Numbers, Numbers]:
    """Tokens/s of every side and this process's CPU time per sample (ms), in turns; the order turns around every time."""
    rates: Numbers = {side.name: [] for side in sides}
    cpu_ms: Numbers = {side.name: [] for side in sides}
    for number in range(repetitions + 1):
        for order, side in enumerate(sides if number % 2 else list(reversed(sides))):
            start, cpu = time.perf_counter(), time.process_time()
            tokens = await side.run(number * len(sides) + order)
            if number:  # the first round warms up
                rates[side.name].append(tokens / (time.perf_counter() - start))
                cpu_ms[side.name].append(1000 * (time.process_time() - cpu) / samples)
        say(f"round {number} of {repetitions}: " + ", ".join(f"{k} {v[-1]:.0f} tok/s" for k, v in rates.items() if v))
    return rates, cpu_ms


async def main() -> None:
    quick = arguments(__doc__).quick
    prepare_environment()
    from slipstream.cluster.launch import ray_session
    from slipstream.trainer.model import resolve_model

    groups, repetitions = (64, 5) if quick else (128, 15)
    recipe = recipe_of(groups)
    model = resolve_model(recipe.model, recipe.seed, WORK / "models")
    prompts = prompts_of(recipe, model)
    with ray_session(recipe):
        sides, shutdown = await sides_of(recipe, model, prompts)
        sides.append(await ray_side(recipe, model, prompts))
        rates, cpu_ms = await measure(sides, repetitions, groups * GROUP_SIZE)
        shutdown()

    def ratios(ours: str, base: str) -> list[float]:
        return [a / b for a, b in zip(rates[ours], rates[base], strict=True)]

    figures = {
        "tokens_ratio": ratios("ours", "bare"),
        "tokens_ratio_short": ratios("ours_short", "bare_short"),
        "tokens_ratio_through_ray": ratios("ray", "bare"),
        "seeded_ratio": ratios("seeded", "ours"),
        **{f"tokens_per_s_{name}": values for name, values in rates.items()},
        **{f"cpu_ms_per_sample_{name}": values for name, values in cpu_ms.items()},
    }
    sizes = {"groups": groups, "group_size": GROUP_SIZE, "max_num_seqs": recipe.rollout.max_num_seqs, "max_tokens": 32}
    finish("engine_overhead", figures, quick, model="builtin:tiny, untrained", **sizes, repetitions=repetitions)


if __name__ == "__main__":
    asyncio.run(main())
