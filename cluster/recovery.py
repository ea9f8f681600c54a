"""What the controller keeps in a checkpoint, and how an attempt begins: from nothing, or from the last checkpoint.

``controller.json``: version, data position, ledger, coefficient of the KL in the reward, the ready groups in full, and the
tasks in flight (which are leased again under their own ids).  The learner's part is ``trainer.checkpoint``'s; both are
published by one rename.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slipstream.cluster.cursor import Cursor
from slipstream.cluster.drafts import FOLDER as DRAFTS
from slipstream.cluster.drafts import draft_folder
from slipstream.cluster.evaluation import Encoded, EvalResult
from slipstream.cluster.fleet import gpu_share
from slipstream.cluster.ledger import Ledger
from slipstream.core.mistakes import UserError
from slipstream.core.recipe import dump_recipe
from slipstream.core.records import DraftCounts, Group, Task, Trajectory, VersionSpan, WeightVersion, spans_of, versions_of
from slipstream.core.rundir import RunDirectory
from slipstream.core.schema import Recipe
from slipstream.rollout.prompts import PromptEncoder
from slipstream.rollout.speculation.checks import require_runnable
from slipstream.rollout.tasks import is_file, open_source
from slipstream.trainer.checkpoint import LEARNER, latest, write_checkpoint
from slipstream.trainer.model import context_limit, load_tokenizer, parameter_shapes, resolve_model
from slipstream.trainer.teacher import require_same_vocabulary

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
    reference_path: str | None
    teacher_path: str | None
    critic_path: str | None
    draft_path: Path | None
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
    path = resolve_model(recipe.model, recipe.seed, CACHE)
    encoder = prompt_encoder(recipe, path)
    source = open_source(recipe.data, recipe.seed, "train", recipe.monitor.eval)
    fresh = Parts(
        run_id=run_id,
        model_path=str(path),
        reference_path=_reference(recipe, path),
        teacher_path=_teacher(recipe, path),
        critic_path=_critic(recipe, path),
        draft_path=_draft(recipe, path),
        version=WeightVersion(0, 0),
        ledger=Ledger(),
        cursor=Cursor(source, encoder, recipe.data.epochs),
        held_out=held_out_tasks(recipe, path),
        encoder=encoder,
        context=context_limit(recipe.model, path),
    )
    return _restore(fresh, recipe, run) if resume else fresh


def _restore(parts: Parts, recipe: Recipe, run: RunDirectory) -> Parts:
    """The same parts as the last checkpoint knew them, under the next attempt; records of lost batches are removed."""
    saved, version = last_checkpoint(run)
    state = json.loads((saved / FILE).read_text())
    require_same(recipe, saved)
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


def _reference(recipe: Recipe, policy: Path) -> str | None:
    """The folder of ``model.reference``; None where the policy itself is the reference, or none is needed.

    Raises UserError for one of another vocabulary, or that the policy could not be copied into when it is refreshed.
    """
    if recipe.model.reference is None or not recipe.algo.kl.coefficient:
        return None
    other = recipe.model.model_copy(update={"path": recipe.model.reference})
    path = resolve_model(other, recipe.seed, CACHE, "model.reference")
    require_same_vocabulary(path, policy, key="model.reference", ours="policy")
    if recipe.algo.kl.refresh_every is not None and (shapes := parameter_shapes(path)) != (ours := parameter_shapes(policy)):
        name = sorted({*shapes.items()} ^ {*ours.items()})[0][0]
        there = f"{name} is {ours.get(name, 'not there')} in {policy}, and {shapes.get(name, 'not there')} in {path}"
        raise UserError(
            f"algo.kl.refresh_every: the policy cannot become the reference: {there}; expected a model.reference of its "
            "shape: take one, or remove refresh_every"
        )
    return str(path)


def _teacher(recipe: Recipe, student: Path) -> str | None:
    """The folder of ``distill.teacher``.  It is in no checkpoint: a resumed run reads it again."""
    if recipe.distill.teacher is None:
        return None
    other = recipe.model.model_copy(update={"path": recipe.distill.teacher})
    path = resolve_model(other, recipe.seed, CACHE, "distill.teacher")
    require_same_vocabulary(path, student)
    return str(path)


def _critic(recipe: Recipe, policy: Path) -> str | None:
    """The folder of ``algo.critic.path``, which a resumed run takes from its checkpoint instead."""
    if recipe.algo.critic is None or recipe.algo.critic.path is None:
        return None
    other = recipe.model.model_copy(update={"path": recipe.algo.critic.path})
    path = resolve_model(other, recipe.seed, CACHE, "algo.critic.path")
    require_same_vocabulary(path, policy, key="algo.critic.path", ours="policy")
    return str(path)


def _draft(recipe: Recipe, target: Path) -> Path | None:
    """The folder of the draft.  Raises UserError with every reason why the engines could not use it."""
    if not recipe.rollout.speculation.on:
        return None
    folder = draft_folder(recipe, CACHE)
    require_runnable(recipe.rollout.speculation, target, folder, on_gpu=gpu_share(recipe) > 0)
    return folder


_MAY_CHANGE = (
    "schedule.steps", "schedule.max_idle_groups", "data.epochs", "checkpoint.", "monitor.", "cluster.",
    "rollout.engines", "rollout.max_num_seqs", "rollout.kv_cache_gib", "rollout.gpu_memory_utilization",
    "rollout.tensor_parallel", "rollout.enforce_eager", "rollout.prefix_caching", "rollout.environment.timeout_s",
    "reward.timeout_s", "reward.workers",
    "trainer.ranks", "trainer.zero_stage", "trainer.max_tokens_per_microbatch", "trainer.bucket_mib",
)  # fmt: skip
"""Keys (and sections) that an override of ``resume`` may touch: how far and where a run goes, not what it learns."""
_HELD_OUT = ("monitor.eval.source", "monitor.eval.options", "monitor.eval.size")
"""Which rows of a file are held out of training, so that a file's tasks would be others after a change of these."""


def _fixed(recipe: Recipe) -> dict[str, Any]:
    """Every key that a resume cannot change, with secrets redacted."""
    leaves = _leaves(yaml.safe_load(dump_recipe(recipe)), "")
    held_out = _HELD_OUT if is_file(recipe.data.source) else ()
    return {key: value for key, value in leaves.items() if key.startswith(held_out) or not key.startswith(_MAY_CHANGE)}


def _leaves(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


def require_same(recipe: Recipe, checkpoint: Path, sections: tuple[str, ...] = ("",)) -> None:
    """Raise UserError if, within ``sections``, the recipe differs from the checkpoint's in what may not change any more."""
    wanted, saved = _fixed(recipe), json.loads((checkpoint / FILE).read_text())["fixed"]
    changed = [
        f"{key}: got {wanted.get(key)}, expected {saved.get(key)}"
        for key in sorted({*wanted, *saved})
        if key.startswith(sections) and wanted.get(key) != saved.get(key)
    ]
    if changed:
        raise UserError("\n".join([*changed, "these stay as they were when the run began; start a new run to change them"]))


def held_out_tasks(recipe: Recipe, model_path: Path) -> list[Encoded]:
    """The evaluation's tasks that fit, as prompt ids; none where ``monitor.eval.size`` is 0."""
    if not recipe.monitor.eval.size:
        return []
    source = open_source(recipe.data, recipe.seed, "eval", recipe.monitor.eval)
    return Cursor(source, prompt_encoder(recipe, model_path), 1).all()


def prompt_encoder(recipe: Recipe, model_path: Path) -> PromptEncoder:
    """Prompts as a run sees them; those that leave no room for a response do not fit."""
    limit = context_limit(recipe.model, model_path)
    return PromptEncoder(
        load_tokenizer(model_path),
        chat=recipe.data.chat,
        system_prompt=recipe.data.system_prompt,
        max_prompt_tokens=_prompt_limit(recipe, limit),
        max_length=limit,
    )


def _prompt_limit(recipe: Recipe, context: int) -> int:
    """Prompt tokens that leave room for a response of ``max_tokens``, and no more than the recipe allows."""
    room = context - (recipe.rollout.sampling.max_tokens if recipe.algo.name != "sft" else 0)
    return min(room, recipe.data.max_prompt_tokens or room)


def last_checkpoint(run: RunDirectory) -> tuple[Path, WeightVersion]:
    """The newest valid checkpoint and its version; one that had to be passed over is an event.  Raises UserError for none."""
    found, warnings = latest(run.checkpoints)
    for warning in warnings:
        log.warning(warning)
        run.append("events", {"time": time.time(), "kind": "warning", "message": warning})
    if found is None:
        raise UserError(f"{run.path}: there is no checkpoint; start the run again under another name")
    return found, WeightVersion.parse(json.loads((found / FILE).read_text())["version"])


async def save(controller: Controller) -> None:
    """One checkpoint of everything, published by one rename; called between two batches.  Nothing where this batch has one."""
    flow, cursor = controller.flow, controller.cursor
    if controller.saved_batch == flow.learner.batch:
        return
    state = {
        "version": str(flow.learner),
        "fixed": _fixed(controller.recipe),
        "ledger": flow.ledger.as_dict(),
        "kl_coefficient": controller.kl_coefficient,
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
            if controller.recipe.rollout.speculation.learns:
                await controller.fleet.save_drafts(folder / DRAFTS)
            if not (folder / LEARNER / "learner.json").exists():
                raise UserError(
                    f"{folder}: the learner wrote its part on another node; keep runs on a disk that all nodes share"
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


def encode_group(group: Group) -> dict[str, Any]:
    """A group as plain JSON: the place of its task, which the source gives again, and versions as spans."""
    return {
        "place": [group.task.epoch, group.task.position],
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


_PLAIN = (
    "sample_id",
    "prompt_ids",
    "token_ids",
    "loss_mask",
    "behaviour_logprobs",
    "status",
    "text",
    "reward",
    "rewards",
    "draft",
)
_TUPLES = ("prompt_ids", "token_ids", "loss_mask", "behaviour_logprobs")


def decode_group(plain: Mapping[str, Any], task_at: Callable[[int, int], Task]) -> Group:
    """The inverse of ``encode_group``; ``task_at`` gives the task of an epoch and position."""
    return Group(
        task=task_at(*plain["place"]),
        dispatched=WeightVersion.parse(plain["dispatched"]),
        trajectories=tuple(_decode_trajectory(t) for t in plain["trajectories"]),
    )


def _decode_trajectory(plain: Mapping[str, Any]) -> Trajectory:
    length = len(plain["token_ids"])

    def versions(name: str) -> tuple[WeightVersion, ...]:
        return versions_of([VersionSpan(WeightVersion.parse(v), a, b) for v, a, b in plain[name]], length)

    values: dict[str, Any] = {name: tuple(plain[name]) if name in _TUPLES else plain[name] for name in _PLAIN}
    return Trajectory(
        **{**values, "draft": DraftCounts(*values["draft"])},
        policy_versions=versions("policy_versions"),
        kv_versions=versions("kv_versions"),
    )
