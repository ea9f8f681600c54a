"""A recipe from YAML files and overrides: merged left to right, resolved, validated; every mistake reported at once.

    recipe = load_recipe([Path("recipes/quickstart.yaml")], ["schedule.steps=20"])

Mappings merge key by key, lists replace each other.  ``${a.b}`` refers to another key; no other interpolation exists.
Importing and loading need no torch, ray or vllm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from slipstream.core import built_in, rules
from slipstream.core.algorithms import PRESETS, contradictions
from slipstream.core.mistakes import UserError
from slipstream.core.recipe_problems import explain, place_of, section_at
from slipstream.core.recipe_yaml import KeyPath, Problem, Source, dotted, path_of, read_file, read_override
from slipstream.core.schema import Recipe
from slipstream.core.section import Problems

REDACTED = "<redacted>"
# The reader refuses every `${name:…}` with its line; these, which import modules or read secrets, are gone besides.
_FORBIDDEN_RESOLVERS = ("oc.coerce", "oc.create", "oc.decode", "oc.env")
_SECRET = re.compile(
    r"^tokens?$|(api|auth|access|refresh|session|bearer|secret|hf|hub|huggingface|github|gitlab|wandb)[_-]?token(?!i)|"
    r"bearer|secret|password|passwd|api[_-]?key|credential",
    re.IGNORECASE,
)
"""Names of options whose texts are secrets; ``end_token`` and ``tokenizer`` are none."""
_MENTION = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[\d+\])*")
_PLACEHOLDERS: dict[KeyPath, Any] = {
    ("name",): "placeholder",
    ("model",): {"path": "builtin:tiny"},
    ("model", "path"): "builtin:tiny",
    ("data",): {"source": "builtin:number_sorting"},
    ("data", "source"): "builtin:number_sorting",
}
_ROUNDS = 4  # rules over several keys run only on sections whose keys are right; each round uncovers one layer


class RecipeError(UserError):
    """Everything that is wrong with a recipe; ``problems`` lists it, each with key, place and remedy."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  ".join([f"{count} in the recipe:", *map(str, problems)]))


def load_recipe(
    files: Sequence[Path], overrides: Sequence[str] = (), also: Callable[[Recipe], Problems] = lambda recipe: []
) -> Recipe:
    """The recipe of ``files``, merged left to right, with ``a.b=c`` overrides on top.

    Raises RecipeError (a UserError) with all problems: unreadable files, YAML errors, unknown, missing, doubled or
    mistyped keys, values out of range, broken rules between keys, references that lead nowhere, and what ``also`` finds in
    what the schema accepts (whether the files that a recipe names are there, say).
    """
    if not files:
        raise RecipeError([Problem("", "", "got no recipe file, expected at least one")])
    for name in _FORBIDDEN_RESOLVERS:
        OmegaConf.clear_resolver(name)
    sources, changes = [read_file(path) for path in files], [read_override(text) for text in overrides]
    config, places, problems = _merge(sources, changes)
    problems += _mere_labels(sources, changes, config)
    plain = _resolve(config, (), places, problems)
    suspects = {problem.key for problem in problems}
    recipe, found = _validate(plain, places, suspects, also)
    if problems or found:
        raise RecipeError(sorted({*problems, *found}, key=_order))
    assert recipe is not None
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """YAML of the resolved recipe.  Secrets in free-form options read ``<redacted>``, which ``load_recipe`` refuses."""
    plain = _redact(recipe.model_dump(mode="json"), inside_options=False)
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def _merge(
    files: Sequence[Source], overrides: Sequence[tuple[str, Source]]
) -> tuple[DictConfig, dict[KeyPath, str], list[Problem]]:
    problems = [problem for source in (*files, *(source for _, source in overrides)) for problem in source.problems]
    unreadable = [source for source in files if not isinstance(source.values, dict)]
    if unreadable:
        raise RecipeError(problems)
    config = OmegaConf.create({})
    places: dict[KeyPath, str] = {(): files[0].name}
    for source in files:
        config.merge_with(OmegaConf.create(source.values))
        places |= {path: place for path, place in source.places.items() if path}
    for key, source in overrides:
        if source.places or not source.problems:
            try:
                OmegaConf.update(config, key, source.values)
            except (OmegaConfBaseException, ValueError) as error:
                reason = str(error).splitlines()[0]
                problems.append(Problem(key, source.name, f"the override leads nowhere: {reason}"))
            places |= source.places
    return config, places, problems


def _mere_labels(files: Sequence[Source], overrides: Sequence[tuple[str, Source]], config: DictConfig) -> list[Problem]:
    """``algo.name`` given over files that already set what it stands for: their keys win, so the name would change nothing.

    A resolved recipe is such a file.  Keys that stand beside the new name, or after it, are wanted so.
    """
    layers = [source.places for source in files]
    layers.append({path: place for _, source in overrides for path, place in source.places.items()})
    naming = max((i for i, places in enumerate(layers) if ("algo", "name") in places), default=0)
    earlier = OmegaConf.to_container(OmegaConf.merge({}, *(source.values for source in files[:naming])))
    written = earlier.get("algo") if isinstance(earlier, dict) else None
    if not isinstance(written, dict):
        return []
    algo = OmegaConf.to_container(config).get("algo")  # type: ignore[union-attr]
    name, before = str(algo.get("name")) if isinstance(algo, dict) else "", str(written.get("name", "grpo"))
    if name == "sft" or name not in PRESETS or before not in PRESETS:
        return []
    later = {path for places in layers[naming:] for path in places}
    left = {path: value for path, value in contradictions(name, before, written).items() if ("algo", *path) not in later}
    if not left:
        return []
    remedy = " ".join(f"algo.{dotted(path)}={json.dumps(left[path])}" for path in sorted(left))
    text = f"got {name}, over a recipe for {before} that sets what it stands for; those keys win, and {name} would be a label"
    return [
        Problem("algo.name", layers[naming]["algo", "name"], f"{text}: set them too ({remedy}), or remove them from the file")
    ]


def _resolve(node: Any, path: KeyPath, places: Mapping[KeyPath, str], problems: list[Problem]) -> Any:
    """Plain values with every reference resolved; what cannot be resolved becomes null and a problem."""
    if not isinstance(node, DictConfig | ListConfig):
        if node == REDACTED:
            text = f"the secret was removed from this file; give it as an override: {dotted(path)}=…"
            problems.append(Problem(dotted(path), place_of(path, places), text))
        return node
    if isinstance(node, DictConfig):
        return {str(key): _resolve_item(node, key, (*path, str(key)), places, problems) for key in node}
    return [_resolve_item(node, index, (*path, index), places, problems) for index in range(len(node))]


def _resolve_item(
    parent: DictConfig | ListConfig, key: Any, path: KeyPath, places: Mapping[KeyPath, str], problems: list[Problem]
) -> Any:
    try:
        value = parent[key]
    except (OmegaConfBaseException, RecursionError) as error:
        reason = str(error).splitlines()[0]
        text = "must be given: `???` stands for a value that the next file or an override sets"
        if not OmegaConf.is_missing(parent, key):
            text = f"the reference cannot be resolved: {reason}; expected the key of another value"
        problems.append(Problem(dotted(path), place_of(path, places), text))
        return None
    return _resolve(value, path, places, problems)


def _validate(
    plain: dict[str, Any], places: Mapping[KeyPath, str], suspects: set[str], also: Callable[[Recipe], Problems]
) -> tuple[Recipe | None, list[Problem]]:
    """Validate; take out what is wrong and validate again, so that rules between the remaining keys are checked too.

    A placeholder stands for a required key.  ``suspects`` are keys that have a problem already: they are left out, and nothing
    more is said about them.
    """
    recipe, problems = None, []
    for _ in range(_ROUNDS):
        try:
            recipe = Recipe.model_validate_json(json.dumps(plain))  # JSON mode: strict, but a list may become a tuple
            break
        except ValidationError as error:
            fresh = [explain(detail, places) for detail in error.errors(include_url=False)]
        fresh = [(path, problem) for path, problem in fresh if not _about(problem.key, suspects)]
        problems += [problem for _, problem in fresh]
        suspects |= {problem.key for _, problem in fresh}
        plain = _mended(plain, suspects)
    if recipe is not None:
        for key, text in (*rules.problems(recipe), *built_in.problems(recipe), *also(recipe)):
            if not _concerns(key, text, suspects):
                problems.append(Problem(key, place_of(path_of(key), places), text))
    return recipe, problems


def _about(key: str, suspects: set[str]) -> bool:
    return any(key == suspect or key.startswith((f"{suspect}.", f"{suspect}[")) for suspect in suspects if suspect)


def _concerns(key: str, text: str, suspects: set[str]) -> bool:
    """Whether a rule is about a suspect: its key is one, or its text names one, in full or as of the key's own section."""
    section = key.rpartition(".")[0]
    named = (name if "." in name else f"{section}.{name}" for name in _MENTION.findall(text))
    return any(_about(name, suspects) for name in (key, *named))


def _mended(plain: dict[str, Any], suspects: set[str]) -> dict[str, Any]:
    """Without the suspects.  A required one has a valid value instead, or its section goes where it may."""
    plain = _without(plain, (), suspects)
    for path in sorted(filter(None, map(path_of, suspects)), key=len):
        section = section_at(path[:-1], Recipe)
        known = section.model_fields.get(str(path[-1])) if section is not None else None
        if known is None or not known.is_required():
            continue
        if path[:2] == ("reward", "parts"):
            _put(plain, path, f"placeholder:function{path[2]}")  # each function may stand once
        elif path in _PLACEHOLDERS:
            _put(plain, path, _PLACEHOLDERS[path])
        else:
            plain = _without(plain, (), {dotted(path[:-1])})
    return plain


def _put(tree: Any, path: KeyPath, value: Any) -> None:
    """Set a value within a section that is there."""
    try:
        for part in path[:-1]:
            tree = tree[part]
        tree[path[-1]] = value
    except (KeyError, IndexError, TypeError):
        pass


def _without(value: Any, path: KeyPath, suspects: set[str]) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if dotted((*path, key)) not in suspects}
        return {key: _without(item, (*path, key), suspects) for key, item in kept.items()}
    if isinstance(value, list):
        return [_without(item, (*path, i), suspects) for i, item in enumerate(value) if dotted((*path, i)) not in suspects]
    return value


def _order(problem: Problem) -> tuple[str, int, str]:
    name, _, line = problem.place.rpartition(":")
    return (name, int(line), problem.key) if line.isdigit() else (problem.place, 0, problem.key)


def _redact(value: Any, inside_options: bool) -> Any:
    if isinstance(value, dict):
        return {
            key: REDACTED
            if inside_options and isinstance(item, str) and _SECRET.search(key)
            else _redact(item, inside_options or key == "options")
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_redact(item, inside_options) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
