"""What the controller keeps in a checkpoint, and how an attempt begins: from nothing, or from the last checkpoint.

``controller.json``: version, data position, ledger, the ready groups in full, and the tasks in flight (which are leased again
under their own ids).  The learner's part is ``trainer.checkpoint``'s; both are published by one rename.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cluster.cursor import Cursor, Encoded
from slipstream.cluster.ledger import Ledger
from slipstream.core.records import Group, Task, Trajectory, VersionSpan, WeightVersion, spans_of, versions_of
from slipstream.core.rundir import RunDirectory
from slipstream.core.schema import Recipe
from slipstream.rollout.environment import PromptEncoder
from slipstream.rollout.tasks import open_source
from slipstream.trainer.checkpoint import LEARNER, latest, write_checkpoint
from slipstream.trainer.model import context_length, load_tokenizer, resolve_model

if TYPE_CHECKING:
    from slipstream.cluster.controller import Controller

log = logging.getLogger("slipstream")

FILE = "controller.json"
CACHE = Path(os.environ.get("SLIPSTREAM_CACHE", Path.home() / ".cache" / "slipstream"))


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a controller starts from.  ``saved`` is the checkpoint's folder, None for a first attempt."""

    run_id: str
    model_path: str
    version: WeightVersion
    ledger: Ledger
    cursor: Cursor
    held_out: list[Encoded]
    encoder: PromptEncoder
    saved: Path | None
    ready: tuple[Group, ...]
    history: Sequence[Mapping[str, Any]]


def prepare(recipe: Recipe, run: RunDirectory, *, resume: bool) -> Parts:
    """Open data and model, and find the last checkpoint if ``resume``.  Raises ValueError for what the user has to mend."""
    path = resolve_model(recipe.model, recipe.seed, CACHE)
    limit = recipe.model.max_length or context_length(path)
    encoder = PromptEncoder(
        load_tokenizer(path),
        system_prompt=recipe.data.system_prompt,
        max_prompt_tokens=_prompt_limit(recipe, limit),
        max_length=limit,
    )
    evaluation = recipe.monitor.eval
    cursor = Cursor(open_source(recipe.data, recipe.seed, "train", evaluation), encoder, recipe.data.epochs)
    held_out = Cursor(open_source(recipe.data, recipe.seed, "eval", evaluation), encoder, 1).all() if evaluation.size else []
    saved = _last_checkpoint(run) if resume else None
    state = json.loads((saved / FILE).read_text()) if saved is not None else None
    version, ledger, ready = WeightVersion(0, 0), Ledger(), ()
    if state is not None:
        attempt, batch = WeightVersion.parse(state["version"])
        version = WeightVersion(_attempts(run, attempt) + 1, batch)
        ledger = Ledger.restore(state["ledger"])
        cursor.epoch, cursor.position, cursor.skipped = state["cursor"]
        ready = tuple(decode_group(group) for group in state["ready"])
        run.rewind(batch)
    return Parts(
        run_id=f"{recipe.name}-{os.getpid()}",
        model_path=str(path),
        version=version,
        ledger=ledger,
        cursor=cursor,
        held_out=held_out,
        encoder=encoder,
        saved=saved,
        ready=ready,
        history=run.read("metrics").records if saved is not None else (),
    )


def _prompt_limit(recipe: Recipe, context: int) -> int:
    """Prompt tokens that leave room for a response of ``max_tokens``, and no more than the recipe allows."""
    room = context - (recipe.rollout.sampling.max_tokens if recipe.algo.name != "sft" else 0)
    return min(room, recipe.data.max_prompt_tokens or room)


def _last_checkpoint(run: RunDirectory) -> Path:
    found, warnings = latest(run.checkpoints)
    for warning in warnings:
        log.warning(warning)
        run.append("events", {"time": time.time(), "kind": "warning", "message": warning})
    if found is None:
        raise ValueError(f"{run.path}: no checkpoint to resume from; start the run again under another name")
    return found


def _attempts(run: RunDirectory, saved: int) -> int:
    """The newest attempt that ever started, which may be newer than the one that wrote the checkpoint."""
    return max([saved, *(e["attempt"] for e in run.read("events").records if e["kind"] == "start")])


async def save(controller: Controller) -> None:
    """One checkpoint of everything, published by one rename; called between two batches."""
    flow, cursor = controller.flow, controller.cursor
    state = {
        "version": str(flow.learner),
        "ledger": flow.ledger.as_dict(),
        "cursor": [cursor.epoch, cursor.position, cursor.skipped],
        "ready": [encode_group(group) for group, _ in flow.ready.values()],
        "in_flight": [controller.places[group_id] for group_id in flow.in_flight],
    }
    controller.telemetry.event("checkpoint", batch=flow.learner.batch)  # here: groups may finish while the learner writes
    step, keep = flow.learner.batch, controller.recipe.checkpoint.keep
    with write_checkpoint(controller.run_dir.checkpoints, step=step, keep=keep) as folder:
        await controller.learners.save(str(folder / LEARNER))
        (folder / FILE).write_text(json.dumps(state))


def in_flight(saved: Path | None) -> list[tuple[int, int]]:
    """(epoch, position) of the tasks that were in flight when the checkpoint was written."""
    if saved is None:
        return []
    return [(epoch, position) for epoch, position in json.loads((saved / FILE).read_text())["in_flight"]]


def evaluation_task(task: Task, step: int) -> Task:
    """The same held-out task under an id of its own per evaluation, so that two evaluations may overlap."""
    return replace(task, id=f"{task.id}@{step}")


def encode_group(group: Group) -> dict[str, Any]:
    """A group as plain JSON; versions as spans."""
    return {
        "task": asdict(group.task),
        "dispatched": str(group.dispatched),
        "trajectories": [
            {
                **{name: getattr(t, name) for name in _PLAIN},
                "policy_versions": [[str(v), a, b] for v, a, b in spans_of(t.policy_versions)],
                "kv_versions": [[str(v), a, b] for v, a, b in spans_of(t.kv_versions)],
            }
            for t in group.trajectories
        ],
    }


_PLAIN = ("sample_id", "prompt_ids", "token_ids", "loss_mask", "behaviour_logprobs", "status", "text", "reward", "rewards")
_TUPLES = ("prompt_ids", "token_ids", "loss_mask", "behaviour_logprobs")


def decode_group(plain: Mapping[str, Any]) -> Group:
    """The inverse of ``encode_group``."""
    task = dict(plain["task"])
    if isinstance(task["prompt"], list):
        task["prompt"] = tuple(task["prompt"])
    return Group(
        task=Task(**task),
        dispatched=WeightVersion.parse(plain["dispatched"]),
        trajectories=tuple(_decode_trajectory(t) for t in plain["trajectories"]),
    )


def _decode_trajectory(plain: Mapping[str, Any]) -> Trajectory:
    length = len(plain["token_ids"])

    def versions(name: str) -> tuple[WeightVersion, ...]:
        return versions_of([VersionSpan(WeightVersion.parse(v), a, b) for v, a, b in plain[name]], length)

    return Trajectory(
        **{name: tuple(plain[name]) if name in _TUPLES else plain[name] for name in _PLAIN},
        policy_versions=versions("policy_versions"),
        kv_versions=versions("kv_versions"),
    )
