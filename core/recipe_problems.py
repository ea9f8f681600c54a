"""What pydantic found wrong with a recipe, in words that say how to fix it."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from slipstream.core.mistakes import UserError
from slipstream.core.other_trainers import called_here
from slipstream.core.recipe_yaml import KeyPath, Problem, dotted
from slipstream.core.schema import Recipe
from slipstream.core.section import Problems

M = TypeVar("M", bound=BaseModel)
_EXPECTED = {
    "string_type": "text",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a section, that is keys and values",
    "finite_number": "a finite number",
}
_TYPO = 0.85
"""Nearer than that is a typing mistake, and no key of another trainer."""
_LIMITS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
_WORDS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}


def place_of(path: KeyPath, places: Mapping[KeyPath, str]) -> str:
    """Where ``path`` stands, or the nearest section around it."""
    for length in range(len(path), -1, -1):
        if found := places.get(path[:length]):
            return found
    return ""


def explain(error: ErrorDetails, places: Mapping[KeyPath, str], root: type[BaseModel] = Recipe) -> tuple[KeyPath, Problem]:
    """One error of pydantic about a ``root`` as a problem, with the path of the key that has to change."""
    path: KeyPath = error["loc"]
    kind, got = error["type"], error["input"]
    if kind == "missing":
        text = _missing(path, root)
    elif kind == "extra_forbidden":
        text = f"unknown key; {_suggestion(path, root, got)}"
    elif kind == "value_error":
        path, text = _broken_rule(path, str(error["ctx"]["error"]), root)
    else:
        text = f"got {_show(got)}, expected {_expected(error)}{_hint(kind, got)}"
    return path, Problem(dotted(path), place_of(path, places), text)


def options_of(model: type[M], options: Mapping[str, Any], key: str) -> M:
    """Free-form options of the recipe (``data.options``) as what their source or grader understands.

    Raises UserError with every problem, in the loader's words.
    """
    try:
        return model.model_validate_json(json.dumps(options))
    except ValidationError as error:
        found = [explain(detail, {}, model)[1] for detail in error.errors(include_url=False)]
        raise UserError("\n".join(f"{key}.{problem}" for problem in found)) from None


def gathered(checks: Iterable[Callable[[], object]]) -> Problems:
    """What the checks raise as UserError, each line of it ``key: problem``."""
    found: Problems = []
    for check in checks:
        try:
            check()
        except UserError as error:
            found += [(key, text) for key, _, text in (line.partition(": ") for line in str(error).splitlines())]
    return found


def _expected(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if limit := _LIMITS.get(kind):
        return f"a number {_WORDS[limit]} {context[limit]:g}"
    if kind == "literal_error":
        got = error["input"]
        near = difflib.get_close_matches(str(got), context["expected"].replace("'", "").replace(" or ", ", ").split(", "), 1)
        return context["expected"] + (f"; did you mean {near[0]}?" if near and isinstance(got, str) else "")
    if kind in ("too_short", "too_long"):
        return (
            f"at least {_items(context['min_length'])}" if kind == "too_short" else f"at most {_items(context['max_length'])}"
        )
    if kind == "string_too_short":
        return "text that is not empty"
    if kind == "string_pattern_mismatch":
        return "letters, digits, `.`, `_` and `-`, a letter or digit first, at most 100 of them"
    return _EXPECTED.get(kind) or error["msg"].removeprefix("Input should be ")


def _items(count: int) -> str:
    return f"{count} item" + ("" if count == 1 else "s")


def _show(value: Any) -> str:
    """A value as the recipe writes it, short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping | list):
        return ("a list" if value else "an empty list") if isinstance(value, list) else "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _hint(kind: str, got: Any) -> str:
    """How the value came to be of the wrong type, where YAML is the reason."""
    if kind in ("string_type", "literal_error") and isinstance(got, bool):
        return "; YAML reads a bare on, off, yes or no as a boolean: quote it"
    if kind == "string_type" and isinstance(got, int | float):
        return f"; quote it: '{got}'"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(got, str):
        return "; remove the quotes" if got.lower() in ("true", "false") or _is_number(got) else ""
    if kind == "int_type" and isinstance(got, float) and got.is_integer():
        return f"; write {got:.0f}"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _missing(path: KeyPath, root: type[BaseModel]) -> str:
    if isinstance(path[-1], int):
        return "missing; the list has too few items"
    model = section_at(path[:-1], root)
    about = model.model_fields[str(path[-1])].description if model else None
    return f"missing; add `{path[-1]}: …`" + (f" ({about})" if about else "")


def _broken_rule(path: KeyPath, message: str, root: type[BaseModel]) -> tuple[KeyPath, str]:
    """A rule's message starts with the field it is about: ``estimator: k1 in the loss …``."""
    name, colon, rest = message.partition(": ")
    model = section_at(path, root)
    return ((*path, name), rest) if colon and model and name in model.model_fields else (path, message)


def _suggestion(path: KeyPath, root: type[BaseModel], value: Any) -> str:
    """The key that was meant: one of this section, another trainer's, or the same name elsewhere in the recipe."""
    model, key = section_at(path[:-1], root), str(path[-1])
    here = sorted(model.model_fields) if model else []
    theirs = called_here(dotted(path), value) if root is Recipe else ""
    if theirs and not difflib.get_close_matches(key, here, 1, cutoff=_TYPO):
        return theirs
    if near := difflib.get_close_matches(key, here, 1):
        return f"did you mean `{near[0]}`?"
    everywhere = [known for known in _all_keys(root) if known.rsplit(".", 1)[-1] == key]
    if everywhere:
        return f"did you mean `{'` or `'.join(everywhere[:3])}`?"
    return f"known here: {', '.join(here)}"


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def section_at(path: KeyPath, root: type[BaseModel]) -> type[BaseModel] | None:
    """The schema of the section at ``path`` (list positions are skipped); None where there is none."""
    model: type[BaseModel] | None = root
    for part in path:
        if isinstance(part, str):
            known = model.model_fields.get(part) if model else None
            model = next(_models_in(known.annotation), None) if known else None
    return model


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, known in model.model_fields.items():
        yield prefix + name
        for child in _models_in(known.annotation):
            yield from _all_keys(child, f"{prefix}{name}.")
