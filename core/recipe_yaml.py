"""YAML text to plain values, with the place (``recipe.yaml:12``) of every key, and every problem at once.

Only mappings with text keys, lists, text, numbers, booleans and null exist here: no tag can name a Python object, and no
interpolation can call a resolver (``${oc.env:…}`` reads secrets, ``${oc.coerce:…}`` imports modules).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

KeyPath = tuple[str | int, ...]
MAX_BYTES = 128 * 1024
MAX_NODES = 20_000  # after aliases are expanded, so that ten lines cannot become gigabytes
MAX_DEPTH = 32

_SCALARS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null")}
_MAP, _SEQ, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "merge"))


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: ``Problem("schedule.steps", "recipe.yaml:7", "got -5, expected a number greater than 0")``."""

    key: str
    place: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.key, self.text) if part)


@dataclass(slots=True)
class Source:
    """The values of one file or override, where each key stands, and what is wrong with it."""

    name: str
    values: Any = None
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def dotted(path: KeyPath) -> str:
    """``("reward", "parts", 0, "weight")`` -> ``"reward.parts[0].weight"``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def path_of(key: str) -> KeyPath:
    """The inverse of ``dotted``."""
    return tuple(int(part) if part.isdigit() else part for part in re.findall(r"[\w-]+", key))


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with ``1e-6`` read as a number and dates as text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def read_file(path: Path) -> Source:
    """The recipe in ``path``.  Anything wrong with it is in ``problems``, and ``values`` is then what could be read."""
    source = Source(str(path))
    try:
        if path.stat().st_size > MAX_BYTES:
            size = f"got {path.stat().st_size} bytes, expected at most {MAX_BYTES}"
            source.problems.append(Problem("", source.name, f"{size}; a recipe is short, data goes into files of its own"))
            return source
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        source.problems.append(Problem("", source.name, "no such recipe file; check the path"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        source.problems.append(Problem("", source.name, f"cannot be read as a recipe: {reason}"))
    else:
        _parse(text, source, by_line=True)
        if not source.problems and not isinstance(source.values, dict):
            got = "an empty file" if source.values is None else f"{source.values!r:.60}"
            source.problems.append(
                Problem(
                    "", source.name, f"got {got}, expected keys and values such as `name: my-run`; see recipes/ for examples"
                )
            )
    return source


def read_override(text: str) -> tuple[str, Source]:
    """``"schedule.steps=20"`` as its key and its value, which is YAML (``null``, ``[a, b]``, ``{size: 5}``)."""
    source = Source("command line")
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+|\[\d+\])*", key):
        problem = f"got {text!r}, expected an override such as schedule.steps=20"
        source.problems.append(Problem("", source.name, problem))
    else:
        path = path_of(key)
        source.places[path] = source.name
        _parse(value, source, path=path)
    return key, source


def _parse(text: str, source: Source, path: KeyPath = (), by_line: bool = False) -> None:
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        reader = _Reader(loader, source, by_line)
        source.values = reader.read(root, path) if root is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source.name}:{mark.line + 1}" if mark and by_line else source.name
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        source.problems.append(Problem(dotted(path), place, f"not valid YAML: {what}; check indentation, quotes and brackets"))
    except RecursionError:
        source.problems.append(Problem(dotted(path), source.name, f"nested too deeply, expected at most {MAX_DEPTH} levels"))
    finally:
        if loader is not None:
            loader.dispose()


@dataclass(slots=True)
class _Reader:
    """Turns YAML nodes into values; every node's place is noted under its path."""

    loader: _Loader
    source: Source
    by_line: bool
    nodes: int = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        self.nodes += 1
        self.source.places.setdefault(path, self._place(node))
        if self.nodes == MAX_NODES:
            self._problem(node, (), f"more than {MAX_NODES} values after aliases are expanded; a recipe is short")
        if self.nodes >= MAX_NODES or len(path) > MAX_DEPTH:
            if self.nodes < MAX_NODES:
                self._problem(node, path[:1], f"nested too deeply, expected at most {MAX_DEPTH} levels")
            return None
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            return [self.read(child, (*path, index)) for index, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
            return self._scalar(node, path)
        self._problem(node, path, f"got the YAML tag {node.tag!r}; recipes are data, tags are refused: remove it")
        return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for part in parts:
                    inherited = self.read(part, path)
                    merged = {**(inherited if isinstance(inherited, dict) else {}), **merged}
                continue
            key = key_node.value
            if key_node.tag != "tag:yaml.org,2002:str" or not isinstance(key, str):
                self._problem(key_node, path, f"the key `{key!s:.40}` is read as {_kind(key_node)}, not as text; quote it")
            elif key in values:
                first = self.source.places[*path, key]
                self._problem(key_node, (*path, key), f"the key stands twice, first at {first}; remove one of them")
            else:
                self.source.places[*path, key] = self._place(key_node)
                values[key] = self.read(value_node, (*path, key))
        return {**merged, **values}

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        value = self.loader.construct_object(node)
        if isinstance(value, float) and not math.isfinite(value):
            self._problem(node, path, f"got {node.value}, expected a finite number")
            return None
        if isinstance(value, str) and "${" in value:
            if call := next(_resolver_calls(value), None):
                calls = f"got `{call}`: recipes are data, only references to other keys such as ${{schedule.steps}} are allowed"
                self._problem(node, path, calls)
                return None
            try:
                OmegaConf.create({"value": value})
            except OmegaConfBaseException as error:
                reason = str(error).splitlines()[0]
                self._problem(node, path, f"got {value!r}, expected a reference such as ${{schedule.steps}} ({reason})")
                return None
        return value

    def _place(self, node: yaml.Node) -> str:
        return f"{self.source.name}:{node.start_mark.line + 1}" if self.by_line else self.source.name

    def _problem(self, node: yaml.Node, path: KeyPath, text: str) -> None:
        self.source.problems.append(Problem(dotted(path), self._place(node), text))


def _kind(node: yaml.Node) -> str:
    return {"bool": "a boolean", "int": "a number", "float": "a number", "null": "null"}.get(
        node.tag.rsplit(":", 1)[-1], "a structure"
    )


def _resolver_calls(text: str) -> Iterator[str]:
    """The ``${name:…}`` in ``text``, nested ones included.  In a reference (``${a.b}``) a colon cannot occur."""
    for opening in re.finditer(r"(?<!\\)(?:\\\\)*\$\{", text):
        depth, start = 0, text.index("$", opening.start())
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if text[position] == ":" and depth:
                yield f"{text[start : position + 1]}…}}"
                break
            if text[position] == "}" and depth == 0:
                break
