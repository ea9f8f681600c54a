"""The arms of benchmarks/tts.py in the engine: tokens per second, and the time that updates take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import say
from tts_policy import RECIPE, TEMPERATURE, TOKENS, encoded
from tts_replay import ARMS

PAIRS = {suffix: (f"frozen{suffix}", f"tts{suffix}") for suffix in ("", "_dynamic", "_model")}
"""A frozen draft, and the same one that learns, by the suffix of their figures."""


def speculations(head_path: Path, model_path: Path) -> dict[str, dict[str, Any]]:
    head = {"method": "eagle3", "draft": str(head_path), "tokens": TOKENS}
    model = {"method": "draft_model", "draft": str(model_path), "tokens": TOKENS}
    learning = {"tts": {"enabled": True, "every": ARMS["tts"].every, "lr": ARMS["tts"].lr, "train": "body"}}
    return {
        "none": {},
        "ngram": {"method": "ngram", "tokens": TOKENS, "lookup_min": 2, "lookup_max": 3},
        "frozen": head,
        "tts": head | learning,
        "frozen_dynamic": head | {"lookahead": "dynamic"},
        "tts_dynamic": head | learning | {"lookahead": "dynamic"},
        "frozen_model": model,
        "tts_model": model | learning,
    }


def live(
    tokenizer: Any,
    arms: Mapping[str, Mapping[str, Any]],
    figures: dict[str, list[float]],
    marks: Sequence[int],
    numbers: Sequence[int],
) -> None:
    """One request at a time; every arm starts anew for each prompt, so that it has learnt from this response alone."""
    for number in numbers:
        prompt = encoded(tokenizer, number)
        speeds = {}
        for arm, keys in arms.items():
            speeds[arm], written, stats = asyncio.run(served(keys, [prompt], marks))
            say(f"live, prompt {number}, {arm}: {speeds[arm]} tokens per second")
            if stats is not None:
                figures[f"live_acceptance_{arm}"].append(written / (written - stats.acceptance.accepted))
                if stats.learning is not None:
                    suffix = arm.removeprefix("tts")
                    figures[f"update_cost_share{suffix}"].append(stats.learning.update_s / stats.learning.busy_s)
        record_speeds(figures, speeds, {mark: str(mark) for mark in marks})


def live_batch(
    tokenizer: Any, arms: Mapping[str, Mapping[str, Any]], figures: dict[str, list[float]], tokens: int = 250
) -> None:
    prompts = [encoded(tokenizer, number) for number in range(4)]
    speeds = {}
    for arm, keys in arms.items():
        speeds[arm], *_ = asyncio.run(served(keys, prompts, [tokens]))
        say(f"live, four at a time, {arm}: {speeds[arm]} tokens per second")
    record_speeds(figures, speeds, {tokens: "batch4"})


def record_speeds(figures: dict[str, list[float]], speeds: Mapping[str, Mapping[int, float]], names: Mapping[int, str]) -> None:
    for mark, name in names.items():
        for arm in [arm for arm in speeds if arm != "none"]:
            figures[f"tokens_ratio_{arm}_vs_none_{name}"].append(speeds[arm][mark] / speeds["none"][mark])
        for suffix, (frozen, learning) in PAIRS.items():
            if frozen not in speeds or learning not in speeds:
                continue
            figures[f"tokens_ratio_vs_frozen{suffix}_{name}"].append(speeds[learning][mark] / speeds[frozen][mark])


async def served(
    keys: Mapping[str, Any], prompts: Sequence[Sequence[int]], marks: Sequence[int]
) -> tuple[dict[int, float], int, Any]:
    """Tokens per second of an engine of its own until each request has written so many tokens (on average), all tokens
    written, and its drafts."""
    from slipstream.cluster.models import CACHE
    from slipstream.core.recipe import load_recipe
    from slipstream.core.records import WeightVersion
    from slipstream.core.schema import Sampling
    from slipstream.core.speculation import Speculation
    from slipstream.rollout.engine import Engine
    from slipstream.trainer.model import resolve_model

    class Unending(Engine):
        def _params(self, seed: int | None, max_tokens: int) -> Any:
            params = super()._params(seed, max_tokens)
            params.ignore_eos = True
            return params

    recipe = load_recipe([RECIPE], [])
    speculation = Speculation.model_validate(keys)
    sampling = Sampling(temperature=TEMPERATURE, max_tokens=max(marks))
    rollout = recipe.rollout.model_copy(update={"speculation": speculation, "sampling": sampling, "max_num_seqs": len(prompts)})
    engine = await Unending.start(
        resolve_model(recipe.model, recipe.seed, CACHE),
        model=recipe.model,
        rollout=rollout,
        max_length=recipe.model.max_length or 2048,
        eos_ids=(),
        seed=0,
        version=WeightVersion(0, 0),
        draft_path=Path(speculation.draft) if speculation.draft else None,
    )
    try:
        started, reached = time.perf_counter(), {}
        requests = [asyncio.create_task(engine.sample(tuple(p), request_id=str(i))) for i, p in enumerate(prompts)]
        while not all(request.done() for request in requests):
            await asyncio.wait(requests, timeout=0.02)
            written = engine.sampled_tokens
            for mark in marks:
                if mark not in reached and written >= mark * len(prompts):
                    reached[mark] = written / (time.perf_counter() - started)
        await asyncio.gather(*requests)
        return reached, engine.sampled_tokens, await engine.drafts()
    finally:
        engine.shutdown()
