"""What the controller keeps in a checkpoint, and how an attempt begins: from nothing, or from the last checkpoint.

``controller.json``: version, data position, ledger, coefficient of the KL in the reward, the ready groups in full, and the
tasks in flight (which are leased again under their own ids).  The learner's part is ``trainer.checkpoint``'s; drafts that learn
are in ``drafts/``.  All are published by one rename.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.cluster.cursor import Cursor, held_out_tasks, prompt_encoder
from slipstream.cluster.drafts import FOLDER as DRAFTS
from slipstream.cluster.evaluation import Encoded, EvalResult
from slipstream.cluster.fixed import fixed_keys, require_same
from slipstream.cluster.group_codec import decode_group, encode_group
from slipstream.cluster.ledger import Ledger
from slipstream.cluster.models import Models, find_models
from slipstream.core.mistakes import UserError
from slipstream.core.records import Group, WeightVersion
from slipstream.core.rundir import RunDirectory
from slipstream.core.schema import Recipe
from slipstream.rollout.prompts import PromptEncoder
from slipstream.rollout.tasks import open_source
from slipstream.trainer.checkpoint import LEARNER, latest, write_checkpoint
from slipstream.trainer.model import context_limit

if TYPE_CHECKING:
    from slipstream.cluster.controller import Controller

log = logging.getLogger("slipstream")

FILE = "controller.json"


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a controller starts from.  ``saved`` is the checkpoint's folder, None for a first attempt."""

    run_id: str
    models: Models
    version: WeightVersion
    ledger: Ledger
    cursor: Cursor
    held_out: list[Encoded]
    encoder: PromptEncoder
    context: int
    """Tokens of prompt and response together."""
    saved: Path | None = None
    ready: tuple[Group, ...] = ()
    in_flight: tuple[tuple[int, int], ...] = ()
    """(epoch, position) of tasks whose attempt was interrupted."""
    kl_coefficient: float | None = None
    """As it had adapted; None in a first attempt, which starts from the recipe's."""
    history: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[EvalResult] = ()
    publishes: int = 0
    """Of the attempts before, those of batches that were lost included."""


def prepare(recipe: Recipe, run: RunDirectory, run_id: str, *, resume: bool) -> Parts:
    """Open data and model, and find the last checkpoint if ``resume``.  Raises UserError for what the user has to mend."""
    models = find_models(recipe, resume=resume)
    encoder = prompt_encoder(recipe, models.policy)
    source = open_source(recipe.data, recipe.seed, "train", recipe.monitor.eval)
    fresh = Parts(
        run_id=run_id,
        models=models,
        version=WeightVersion(0, 0),
        ledger=Ledger(),
        cursor=Cursor(source, encoder, recipe.data.epochs),
        held_out=held_out_tasks(recipe, models.policy),
        encoder=encoder,
        context=context_limit(recipe.model, models.policy),
    )
    return _restore(fresh, recipe, run) if resume else fresh


def _restore(parts: Parts, recipe: Recipe, run: RunDirectory) -> Parts:
    """The same parts as the last checkpoint knew them, under the next attempt; records of lost batches are removed."""
    saved, version, state = last_checkpoint(run)
    require_same(recipe, state["fixed"])
    run.write_recipe(recipe)
    events = run.read("events").records
    attempts = [version.attempt, *(e["attempt"] for e in events if e["kind"] == "start")]
    parts.cursor.epoch, parts.cursor.position, parts.cursor.skipped = state["cursor"]
    run.rewind(version.batch)
    return replace(
        parts,
        version=WeightVersion(max(attempts) + 1, version.batch),
        ledger=Ledger.restore(state["ledger"]),
        saved=saved,
        ready=tuple(decode_group(group, parts.cursor.task) for group in state["ready"]),
        in_flight=tuple((epoch, position) for epoch, position in state["in_flight"]),
        kl_coefficient=state["kl_coefficient"],
        history=run.read("metrics").records,
        publishes=sum(e["kind"] == "confirmed" for e in events),
        evaluations=[EvalResult.of(e) for e in events if e["kind"] == "eval" and e["step"] <= version.batch],
    )


class Checkpoint(NamedTuple):
    folder: Path
    version: WeightVersion
    state: dict[str, Any]
    """What ``save`` wrote of the controller."""


def last_checkpoint(run: RunDirectory) -> Checkpoint:
    """The newest valid checkpoint; one that had to be passed over is an event.  Raises UserError for none."""
    found, warnings = latest(run.checkpoints)
    for warning in warnings:
        log.warning(warning)
        run.append("events", {"time": time.time(), "kind": "warning", "message": warning})
    if found is None:
        raise UserError(f"{run.path}: there is no checkpoint; start the run again under another name")
    state = json.loads((found / FILE).read_text())
    return Checkpoint(found, WeightVersion.parse(state["version"]), state)


async def save(controller: Controller) -> None:
    """One checkpoint of everything, published by one rename; called between two batches.  Nothing where this batch has one.

    Raises UserError where a part was written on another node's disk.
    """
    flow, cursor = controller.flow, controller.cursor
    if controller.saved_batch == flow.learner.batch:
        return
    state = {
        "version": str(flow.learner),
        "fixed": fixed_keys(controller.recipe),
        "ledger": flow.ledger.as_dict(),
        "kl_coefficient": controller.scoring.coefficient,
        "cursor": [cursor.epoch, cursor.position, cursor.skipped],
        "ready": [encode_group(group) for group, _ in flow.ready.values()],
        "in_flight": [*(controller.places[group_id] for group_id in flow.in_flight), *controller.interrupted],
    }
    controller.telemetry.event("checkpoint", batch=flow.learner.batch)  # here: groups may finish while the learner writes
    step, keep = flow.learner.batch, controller.recipe.checkpoint.keep
    try:
        # Hashing and flushing gigabytes takes a while: on a thread, so that groups and the watch go on.
        async with _on_a_thread(write_checkpoint(controller.run_dir.checkpoints, step=step, keep=keep)) as folder:
            await controller.learners.save(str(folder / LEARNER))
            parts = {"the learner": folder / LEARNER / "learner.json"}
            if controller.recipe.rollout.speculation.learns:
                parts |= await controller.fleet.save_drafts(folder / DRAFTS)
            if elsewhere := [who for who, part in parts.items() if not part.exists()]:
                raise UserError(
                    f"{folder}: {', '.join(elsewhere)} wrote on another node; keep runs on a disk that all nodes share"
                )
            (folder / FILE).write_text(json.dumps(state))
    except BaseException as problem:
        problem.add_note(f"while the checkpoint of step {step} was written; those before it are as they were")
        raise
    controller.saved_batch = step


@asynccontextmanager
async def _on_a_thread(manager: AbstractContextManager[Path]) -> AsyncIterator[Path]:
    """A context manager whose beginning and end would block the event loop."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    except BaseException as problem:
        if not await asyncio.to_thread(manager.__exit__, type(problem), problem, problem.__traceback__):
            raise
    else:
        await asyncio.to_thread(manager.__exit__, None, None, None)
