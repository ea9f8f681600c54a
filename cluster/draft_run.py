"""``slipstream draft train``: a draft for a recipe's policy, from the policy's own responses to the recipe's prompts."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoConfig

from slipstream.cluster.cursor import Cursor, prompt_encoder
from slipstream.cluster.launch import RunFailed
from slipstream.cluster.models import CACHE
from slipstream.cluster.waiting import alarm, within
from slipstream.core.mistakes import UserError
from slipstream.core.records import WeightVersion
from slipstream.core.schema import Recipe
from slipstream.core.speculation import DRAFT_CAN_BE_MADE, Speculation
from slipstream.rollout.engine import Engine
from slipstream.rollout.speculation.training import (
    Sample,
    Settings,
    Trainee,
    expected_acceptance,
    look,
    new_trainee,
    require_plain_head,
    require_trainable,
    train,
)
from slipstream.rollout.tasks import open_source
from slipstream.trainer.model import context_limit, eos_token_ids, load_policy, load_tokenizer, resolve_model

log = logging.getLogger("slipstream")

Progress = Callable[[str, int, int, float | None], None]
"""What is being done, how far it is, of how much, and the loss where there is one."""
HELD_OUT = 0.125


@dataclass(frozen=True, slots=True)
class Made:
    """A draft that was made.  Lengths are expected acceptance lengths on responses that it was not trained on."""

    path: Path
    parameters: int
    samples: int
    response_tokens: int
    length_before: float
    length_after: float
    accepted: list[float]
    """Share of rounds in which the first k drafts are accepted, k = 1, 2, …"""
    seconds: float


def train_draft(recipe: Recipe, progress: Progress) -> Made:
    """Sample, train, and write the folder that ``rollout.speculation.draft`` names (with ``draft.json``, the figures).

    Raises UserError for a recipe that no draft can be made for, or a folder that cannot be written or is there already;
    RunFailed where the engine does not come up or goes silent, or the training diverges.
    """
    speculation = recipe.rollout.speculation
    start = time.perf_counter()
    model_path = resolve_model(recipe.model, recipe.seed, CACHE)
    path = _checked(recipe, model_path)
    policy = load_policy(model_path, recipe.model.model_copy(update={"dtype": "float32"})).eval().requires_grad_(False)
    require_plain_head(policy)
    try:
        samples = asyncio.run(_sample(recipe, model_path, progress))
    except TimeoutError as late:
        raise RunFailed(str(late)) from late
    apart = max(int(HELD_OUT * len(samples)), 1)
    trainee = new_trainee(speculation, policy, samples[apart:])
    with _all_cores():
        before, accepted = _trained(recipe, trainee, policy, samples, apart, progress)
    made = Made(
        path=path,
        parameters=sum(p.numel() for p in trainee.parameters()),
        samples=len(samples),
        response_tokens=sum(len(sample.ids) - sample.prompt_length for sample in samples),
        length_before=1 + sum(before),
        length_after=1 + sum(accepted),
        accepted=accepted,
        seconds=time.perf_counter() - start,
    )
    _write(trainee, model_path, made)
    return made


def _trained(
    recipe: Recipe, trainee: Trainee, policy: Any, samples: Sequence[Sample], apart: int, progress: Progress
) -> tuple[list[float], list[float]]:
    """Chances that the first k drafts are accepted, before and after, on the first ``apart`` samples, which are held out."""
    speculation = recipe.rollout.speculation
    training = speculation.training
    seen = []
    for done, sample in enumerate(samples):
        seen.append(look(policy, sample, trainee.layer_ids))
        progress("reading", done + 1, len(samples), None)
    settings = Settings(
        steps=training.steps,
        batch_size=training.batch_size,
        lr=training.lr,
        temperature=recipe.rollout.sampling.temperature,
        tokens=speculation.tokens,
        seed=recipe.seed,
        decay=speculation.tts.decay or float(speculation.tokens),
    )
    before = expected_acceptance(trainee, policy, seen[:apart], settings)
    try:
        for step, loss in enumerate(train(trainee, policy, seen[apart:], settings)):
            progress("training", step + 1, training.steps, loss)
    except FloatingPointError as diverged:
        raise RunFailed(f"rollout.speculation.training.lr: {diverged}") from diverged
    accepted = expected_acceptance(trainee, policy, seen[:apart], settings)
    if not math.isfinite(sum(accepted)):  # the last step's update shows in no loss
        raise RunFailed(f"rollout.speculation.training.lr: the trained draft is not finite; lower lr (got {training.lr:g})")
    return before, accepted


@contextmanager
def _all_cores() -> Iterator[None]:
    """Threads for a process that is alone: a run's own share the cores, so that each has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _checked(recipe: Recipe, model_path: Path) -> Path:
    """Where the draft is to go, whose parent is there.  Raises UserError with everything that stands against making it."""
    speculation, problems = recipe.rollout.speculation, []
    if recipe.warm_start is not None:
        why = "the draft would be made for the policy before it"
        instead = "export a run's policy (slipstream export RUN FOLDER), and give model.path=FOLDER warm_start=null"
        problems.append(f"warm_start: got a warm start, expected null: {why}; {instead}")
    if speculation.method not in DRAFT_CAN_BE_MADE:
        expected = " or ".join(DRAFT_CAN_BE_MADE)
        problems.append(f"rollout.speculation.method: got {speculation.method}, expected {expected}: there is nothing to train")
    else:
        try:
            require_trainable(speculation, AutoConfig.from_pretrained(model_path, local_files_only=True).get_text_config())
        except UserError as impossible:
            problems.append(str(impossible))
    try:
        path = _target(speculation)
    except UserError as misplaced:
        problems.append(str(misplaced))
    if problems:
        raise UserError("\n".join(problems))
    return path


def _target(speculation: Speculation) -> Path:
    """The folder to write, of which all but itself is there.  Raises UserError where it cannot be written."""
    key, draft = "rollout.speculation.draft", speculation.draft
    if draft is None:
        raise UserError(f"{key}: got null, expected the folder to write")
    if draft.startswith(("builtin:", "pip:")):
        raise UserError(f"{key}: got {draft}, which names a model, expected the folder to write")
    path = Path(draft).expanduser()
    try:
        if path.exists() or path.is_symlink():
            raise UserError(f"{key}: {path} is there already; remove it, or name another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=path.parent).cleanup()
    except OSError as problem:
        raise UserError(f"{key}: {path} cannot be written ({problem}); name another folder") from problem
    return path


async def _sample(recipe: Recipe, model_path: Path, progress: Progress) -> list[Sample]:
    """Responses to the first prompts of the training stream that fit, one each, in the recipe's own way of sampling."""
    training, rollout = recipe.rollout.speculation.training, recipe.rollout
    limit = context_limit(recipe.model, model_path)
    prompts = _prompts(recipe, model_path)
    sampling = rollout.sampling.model_copy(update={"max_tokens": training.max_tokens})
    with alarm(recipe.cluster.start_timeout_s, "engine: its start", "cluster.start_timeout_s"):  # vLLM's start blocks the loop
        engine = await Engine.start(
            model_path,
            model=recipe.model,
            rollout=rollout.model_copy(update={"speculation": Speculation(), "sampling": sampling}),
            max_length=limit,
            eos_ids=eos_token_ids(model_path),
            seed=recipe.seed % 2**31,
            version=WeightVersion(0, 0),
        )
    try:
        samples = await _responses(engine, prompts, recipe.cluster.stall_timeout_s, progress)
    finally:
        engine.shutdown()
    shortest = rollout.speculation.tokens + 2
    long_enough = [sample for sample in samples if len(sample.ids) - sample.prompt_length >= shortest]
    if len(long_enough) < 2:
        raise UserError(
            f"draft: of {len(samples)} responses {len(long_enough)} have {shortest} tokens or more, expected at least 2; lower "
            "rollout.speculation.tokens, or raise rollout.speculation.training.samples"
        )
    if short := len(samples) - len(long_enough):
        log.warning("%d of %d responses are left out: they have fewer than %d tokens", short, len(samples), shortest)
    shuffle_by_seed(long_enough, recipe.seed)
    return long_enough


def shuffle_by_seed(samples: list[Sample], seed: int) -> None:
    """In place: the seed's own, whatever the order in which they ended; those held out are the first."""
    samples.sort(key=lambda sample: sample.ids)
    Random(seed).shuffle(samples)


async def _responses(engine: Engine, prompts: Sequence[tuple[int, ...]], limit_s: float, progress: Progress) -> list[Sample]:
    """One response each, as they end.  Raises TimeoutError where none ends for ``limit_s``."""
    pending = [asyncio.create_task(_respond(engine, i, prompt)) for i, prompt in enumerate(prompts)]
    samples: list[Sample] = []
    for ended in asyncio.as_completed(pending):
        what = f"engine: response {len(samples) + 1} of {len(pending)}"
        samples.append(await within(limit_s, what, ended, "cluster.stall_timeout_s"))
        progress("sampling", len(samples), len(pending), None)
    return samples


async def _respond(engine: Engine, number: int, prompt_ids: tuple[int, ...]) -> Sample:
    completion = await engine.sample(prompt_ids, request_id=f"draft-{number}")
    return Sample(prompt_ids + completion.token_ids, len(prompt_ids))


def _prompts(recipe: Recipe, model_path: Path) -> list[tuple[int, ...]]:
    """The first of the training stream that a run would ask, as many as ``training.samples`` or as there are."""
    source = open_source(recipe.data, recipe.seed, "train", recipe.monitor.eval)
    cursor = Cursor(source, prompt_encoder(recipe, model_path), epochs=1)
    return [prompt_ids for _, prompt_ids in islice(iter(cursor.next, None), recipe.rollout.speculation.training.samples)]


def _write(trainee: Trainee, model_path: Path, made: Made) -> None:
    """The whole folder or nothing."""
    with tempfile.TemporaryDirectory(dir=made.path.parent) as scratch:
        folder = Path(scratch) / "draft"
        trainee.save(folder)
        load_tokenizer(model_path).save_pretrained(folder)
        plain: dict[str, Any] = {**asdict(made), "path": str(made.path), "policy": str(model_path)}
        (folder / "draft.json").write_text(json.dumps(plain, indent=1) + "\n")
        folder.rename(made.path)
