"""Every model that a recipe names, as the folder it is in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from slipstream.cluster.fleet import gpu_share
from slipstream.core.mistakes import UserError
from slipstream.core.schema import Recipe
from slipstream.rollout.speculation.checks import require_runnable
from slipstream.trainer.critic import require_value_head
from slipstream.trainer.model import architecture, context_limit, resolve_model
from slipstream.trainer.teacher import require_same_vocabulary

CACHE = Path(os.environ.get("SLIPSTREAM_CACHE", Path.home() / ".cache" / "slipstream"))


@dataclass(frozen=True, slots=True)
class Models:
    """Folders; None for what the recipe does not name or has no use for."""

    policy: Path
    reference: Path | None
    """Where it begins; None where the policy as it begins is the reference, too, and in a resume: a checkpoint has it."""
    teacher: Path | None
    """It is in no checkpoint: a resumed run reads it again."""
    critic: Path | None
    """The same."""
    draft: Path | None


def find_models(recipe: Recipe, *, resume: bool = False) -> Models:
    """Those that a run begins with; a checkpoint holds the others.  Raises UserError for one that is not there, or that does
    not go with the policy."""
    policy = resolve_model(recipe.model, recipe.seed, CACHE)
    return Models(
        policy=policy,
        reference=None if resume else _reference(recipe, policy),
        teacher=_beside(recipe, recipe.distill.teacher, "distill.teacher", policy, "student"),
        critic=None if resume else _critic(recipe, policy),
        draft=_draft(recipe, policy),
    )


def _beside(recipe: Recipe, name: str | None, key: str, policy: Path, ours: str = "policy") -> Path | None:
    """The folder of a model that has the policy's vocabulary."""
    if name is None:
        return None
    path = _named(recipe, name, key)
    require_same_vocabulary(path, policy, key=key, ours=ours)
    return path


def _named(recipe: Recipe, name: str, key: str) -> Path:
    return resolve_model(recipe.model.model_copy(update={"path": name}), recipe.seed, CACHE, key)


def _reference(recipe: Recipe, policy: Path) -> Path | None:
    """Raises UserError for one that the policy could not be copied into when it is refreshed, besides."""
    if not recipe.algo.kl.coefficient:
        return None
    path = _beside(recipe, recipe.model.reference, "model.reference", policy)
    if path is None or recipe.algo.kl.refresh_every is None:
        return path
    theirs, ours = architecture(path), architecture(policy)
    if differing := [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]:
        there = ", ".join(f"{name} is {ours.get(name)} in {policy}, and {theirs.get(name)} in {path}" for name in differing[:3])
        raise UserError(
            f"algo.kl.refresh_every: the policy cannot become the reference: {there}; expected a model.reference of its "
            "architecture: take one, or remove refresh_every"
        )
    return path


def _critic(recipe: Recipe, policy: Path) -> Path | None:
    """Raises UserError for one, or for a policy in its place, that could not have a value head, besides."""
    if recipe.algo.critic is None:
        return None
    path = _beside(recipe, recipe.algo.critic.path, "algo.critic.path", policy)
    require_value_head(path or policy)
    return path


def _draft(recipe: Recipe, target: Path) -> Path | None:
    """Raises UserError with every reason why the engines could not use the draft, or could not draft."""
    if not recipe.rollout.speculation.on:
        return None
    folder = draft_folder(recipe)
    limit = context_limit(recipe.model, target)
    require_runnable(recipe.rollout.speculation, target, folder, on_gpu=gpu_share(recipe) > 0, max_length=limit)
    return folder


def draft_folder(recipe: Recipe) -> Path | None:
    """What ``rollout.speculation.draft`` means; None without one.  Raises UserError where it means nothing.

    A ``draft_model`` is named as ``model.path`` is; the other methods' drafts are folders that only vLLM understands.
    """
    speculation = recipe.rollout.speculation
    if speculation.draft is None:
        return None
    if speculation.method == "draft_model":
        return _named(recipe, speculation.draft, "rollout.speculation.draft")
    return Path(speculation.draft).expanduser()
