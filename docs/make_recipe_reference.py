"""Writes docs/recipe.md from the schema; ``python docs/make_recipe_reference.py`` after a change (a test compares)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slipstream.core import schema

HEAD = """# Recipe reference

Every key, its type, its default and its meaning, generated from `core/schema.py` by `python docs/make_recipe_reference.py`.
Unknown keys are errors. `slipstream validate RECIPE` shows every mistake of a recipe at once.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, section in (("Top level", schema.Recipe), *((f"`{path}`", inner) for path, inner in _nested(schema.Recipe, ""))):
        parts.append(f"\n## {title}\n")
        if section.__doc__:
            parts.append(re.sub(r"``", "`", " ".join(section.__doc__.split())) + "\n")
        parts.append("| key | type | default | meaning |\n| --- | --- | --- | --- |")
        parts += [_row(name, field) for name, field in section.model_fields.items()]
    return "\n".join(parts) + "\n"


def _sections_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in getattr(annotation, "__args__", ()) for found in _sections_of(inner)]


def _nested(section: type[BaseModel], prefix: str) -> list[tuple[str, type[BaseModel]]]:
    """Every section within ``section`` by its path, also where two paths lead to sections of one kind."""
    found: list[tuple[str, type[BaseModel]]] = []
    for name, field in section.model_fields.items():
        for inner in _sections_of(field.annotation):
            found += [(f"{prefix}{name}", inner), *_nested(inner, f"{prefix}{name}.")]
    return found


def _row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {_type(field)} | {_default(field)} | {_escape(meaning(field))} |"


def meaning(field: FieldInfo) -> str:
    """The field's description, or what its section says of itself first."""
    if field.description:
        return field.description
    sections = _sections_of(field.annotation)
    about = (sections[0].__doc__ or "") if sections else ""
    first = re.split(r"\n\n|(?<=\.)  ", about)[0]
    return re.sub(r"``", "`", " ".join(first.split()))


def _type(field: FieldInfo) -> str:
    if _sections_of(field.annotation):
        return "list of sections" if "list" in str(field.annotation) else "section"
    text = str(field.annotation)
    text = re.sub(r"Annotated\[(\w+), [^\]]*\]*\)?\]", r"\1", text)
    text = re.sub(r"typing\.|<class '|'>|NoneType|FieldInfo\([^)]*\)", lambda m: "null" if m[0] == "NoneType" else "", text)
    text = re.sub(r"Optional\[(.*)\]", r"\1 | null", text.replace("None", "null"))
    text = re.sub(r"Literal\[(.*?)\]", lambda m: m[1].replace(", ", " | "), text)
    limits = [str(m) for m in field.metadata if type(m).__name__ in ("Gt", "Ge", "Lt", "Le")]
    spelt = {"Gt(gt=": "> ", "Ge(ge=": "≥ ", "Lt(lt=": "< ", "Le(le=": "≤ "}
    for long, short in spelt.items():
        limits = [limit.replace(long, short).rstrip(")") for limit in limits]
    return _escape(text + (f" ({', '.join(limits)})" if limits else ""))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    if _sections_of(field.annotation) and field.default is not None:
        return "see below"
    value = field.get_default(call_default_factory=True)
    return "null" if value is None else f"`{_escape(str(value))}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    (Path(__file__).parent / "recipe.md").write_text(render())
