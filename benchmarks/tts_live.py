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


def speculations(head_path: Path) -> dict[str, dict[str, Any]]:
    head = {"method": "eagle3", "draft": str(head_path), "tokens": TOKENS}
    return {
        "none": {},
        "ngram": {"method": "ngram", "tokens": TOKENS, "lookup_min": 2, "lookup_max": 3},
        "frozen": head,
        "tts": {**head, "tts": {"enabled": True, "every": ARMS["tts"].every, "lr": ARMS["tts"].lr, "train": "body"}},
    }


def live(
    tokenizer: Any, head_path: Path, figures: dict[str, list[float]], marks: Sequence[int], numbers: Sequence[int]
) -> None:
    """One request at a time; every arm starts anew for each prompt, so that it has learnt from this response alone."""
    for number in numbers:
        prompt = encoded(tokenizer, number)
        speeds = {}
        for arm, keys in speculations(head_path).items():
            speeds[arm], stats = asyncio.run(served(head_path, keys, [prompt], marks))
            say(f"live, prompt {number}, {arm}: {speeds[arm]} tokens per second")
            if stats is not None:
                figures[f"live_acceptance_{arm}"].append(1 + stats.acceptance.accepted / max(stats.acceptance.rounds, 1))
                if stats.learning is not None:
                    figures["update_cost_share"].append(stats.learning.update_s / stats.learning.busy_s)
        record_speeds(figures, speeds, {mark: str(mark) for mark in marks})


def live_batch(tokenizer: Any, head_path: Path, figures: dict[str, list[float]], tokens: int = 250) -> None:
    prompts = [encoded(tokenizer, number) for number in range(4)]
    speeds = {}
    for arm, keys in speculations(head_path).items():
        speeds[arm], _ = asyncio.run(served(head_path, keys, prompts, [tokens]))
        say(f"live, four at a time, {arm}: {speeds[arm]} tokens per second")
    record_speeds(figures, speeds, {tokens: "batch4"})


def record_speeds(figures: dict[str, list[float]], speeds: Mapping[str, Mapping[int, float]], names: Mapping[int, str]) -> None:
    for mark, name in names.items():
        for arm in ("ngram", "frozen", "tts"):
            figures[f"tokens_ratio_{arm}_vs_none_{name}"].append(speeds[arm][mark] / speeds["none"][mark])
        figures[f"tokens_ratio_vs_frozen_{name}"].append(speeds["tts"][mark] / speeds["frozen"][mark])


async def served(
    head_path: Path, keys: Mapping[str, Any], prompts: Sequence[Sequence[int]], marks: Sequence[int]
) -> tuple[dict[int, float], Any]:
    """Tokens per second of an engine of its own until each request has written so many tokens (on average), and its drafts."""
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
        draft_path=head_path if speculation.draft else None,
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
        return reached, await engine.drafts()
    finally:
        engine.shutdown()
