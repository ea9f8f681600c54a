"""Whether what a recipe names is there: models, data, the user's own modules.  Nothing is loaded or imported for it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from slipstream.core.built_in import ENVIRONMENTS, REWARDS
from slipstream.core.mistakes import UserError, did_you_mean, siblings
from slipstream.core.recipe_problems import gathered
from slipstream.core.schema import Data, Recipe
from slipstream.core.section import Problems
from slipstream.core.speculation import DRAFT_CAN_BE_MADE, WITH_DRAFT, Speculation
from slipstream.rollout.rewards import require_gradable
from slipstream.rollout.rows import Row
from slipstream.rollout.tasks import is_file, look_at_source
from slipstream.trainer.folders import require_model

DRAFT = "rollout.speculation.draft"
_HUB_ID = re.compile(r"[\w-]+/[\w-]+")


def absent(recipe: Recipe, folder: Path, *, draft_to_come: bool = True) -> Problems:
    """Everything that ``recipe``, of a file in ``folder``, names and that is not there, as (key, problem).

    With ``draft_to_come`` it may name a draft that ``slipstream draft train`` has still to make.
    """
    checks: list[Callable[[], object]] = [partial(require_model, path, key) for key, path in _models(recipe)]
    checks.append(partial(_require_draft, recipe.rollout.speculation, draft_to_come))
    checks.append(partial(_look_at_training_data, recipe, folder))
    if recipe.monitor.eval.size and (held_out := recipe.monitor.eval.source) is not None:
        other = recipe.data.model_copy(update={"source": held_out, "options": recipe.monitor.eval.options})
        checks.append(partial(_look_at, other, folder, "monitor.eval.source", "monitor.eval.options"))
    for i, part in enumerate(recipe.reward.parts):
        if part.function not in REWARDS:
            checks.append(partial(_require_module, part.function, f"reward.parts[{i}].function", folder))
    if (name := recipe.rollout.environment.name) not in ENVIRONMENTS:
        checks.append(partial(_require_module, name, "rollout.environment.name", folder))
    return gathered(checks)


def located(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with its data where they are: as the path says, or beside the recipe, in ``folder``."""
    held_out = recipe.monitor.eval
    if held_out.source is not None:
        held_out = held_out.model_copy(update={"source": _locate(held_out.source, folder)})
    data = recipe.data.model_copy(update={"source": _locate(recipe.data.source, folder)})
    return recipe.model_copy(update={"data": data, "monitor": recipe.monitor.model_copy(update={"eval": held_out})})


def _locate(source: str, folder: Path) -> str:
    if not is_file(source):
        return source
    path = Path(source).expanduser()
    return str(folder / path) if not path.exists() and (folder / path).exists() else str(path)


def _models(recipe: Recipe) -> list[tuple[str, str]]:
    """Keys and values of what is named as ``model.path`` is, drafts apart."""
    critic = recipe.algo.critic
    named = [
        ("model.path", recipe.model.path),
        ("model.reference", recipe.model.reference if recipe.algo.kl.coefficient else None),
        ("distill.teacher", recipe.distill.teacher),
        ("algo.critic.path", critic.path if critic is not None else None),
    ]
    return [(key, path) for key, path in named if path is not None]


def _require_draft(speculation: Speculation, to_come: bool) -> None:
    draft, method = speculation.draft, speculation.method
    if draft is None or method not in (*WITH_DRAFT, "mtp"):  # others take none, which the recipe's rules say
        return
    by_name = draft.startswith(("builtin:", "pip:"))
    can_be_made = method in DRAFT_CAN_BE_MADE and not by_name and not Path(draft).expanduser().exists()
    if can_be_made and to_come:
        return
    if method == "draft_model" and not can_be_made:
        require_model(draft, DRAFT)
    elif not Path(draft).expanduser().is_dir():
        make = "; `slipstream draft train` makes it" if can_be_made else ""
        raise UserError(f"{DRAFT}: {draft} is no folder, expected that of a draft for {method}{make}")


def _look_at_training_data(recipe: Recipe, folder: Path) -> None:
    """The source, and that its first row has what the reward functions compare with, and what supervised steps imitate."""
    data = recipe.data
    row = _look_at(data, folder, "data.source", "data.options")
    if row is None:
        return
    checks: list[Callable[[], object]] = [partial(_require_demonstration, recipe, row)]
    for i, part in enumerate(recipe.reward.parts):
        key = f"reward.parts[{i}].function"
        checks.append(partial(require_gradable, part.function, data.source, row.answer, row.columns, key))
    if problems := gathered(checks):
        raise UserError("\n".join(f"{key}: {text}" for key, text in problems))


def _require_demonstration(recipe: Recipe, row: Row) -> None:
    if row.completion is None and (recipe.warm_start is not None or recipe.algo.name == "sft"):
        key = "warm_start" if recipe.warm_start is not None else "algo.name"
        raise UserError(
            f"{key}: the first row of {recipe.data.source} has no demonstration; supervised steps need a column `completion`, "
            "or `messages` that end with the assistant's turn"
        )


def _look_at(data: Data, folder: Path, source_key: str, options_key: str) -> Row | None:
    source = _locate(data.source, folder)
    if is_file(source) and not Path(source).exists():
        path = Path(source)
        meant = did_you_mean(path.name, {*siblings(path), *siblings(folder / path)})
        where = "" if path.is_absolute() else f", neither in {Path.cwd()} nor beside the recipe in {folder}"
        hub = "; data sets of the hub have to be saved first, with datasets' `to_json` or `save_to_disk`"
        is_id = _HUB_ID.fullmatch(data.source) and not meant and not path.parent.exists()
        raise UserError(
            f"{source_key}: {source} does not exist{where}; expected a .jsonl or .parquet file, a folder saved by datasets, "
            f"builtin:… or reasoning_gym:…{hub if is_id else meant}"
        )
    return look_at_source(data.model_copy(update={"source": source}), source_key, options_key)


def _require_module(name: str, key: str, folder: Path) -> None:
    """Raise UserError where the module of ``module:name`` is neither beside the recipe nor installed, or lacks the name."""
    module, _, attribute = name.partition(":")
    relative = Path(*module.split("."))
    file = next((f for place in (folder, Path.cwd()) for f in _files(place / relative) if f.is_file()), None)
    if file is not None:
        words = re.findall(r"\w+", file.read_text(encoding="utf-8", errors="replace"))
        if attribute not in words:
            raise UserError(f"{key}: got {name}, but {file} has no {attribute}{did_you_mean(attribute, set(words))}")
    elif importlib.util.find_spec(relative.parts[0]) is None:
        known = {f.stem for place in (folder, Path.cwd()) for f in place.glob("*.py")}
        raise UserError(
            f"{key}: got {name}, but there is no {relative}.py beside the recipe in {folder}, and no installed module of that "
            f"name{did_you_mean(module, known)}"
        )


def _files(module: Path) -> tuple[Path, Path]:
    return module.with_name(f"{module.name}.py"), module / "__init__.py"
