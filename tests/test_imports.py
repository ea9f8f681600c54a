"""Who may import whom (DESIGN section 1): core < algos < distill < rollout, trainer < cluster, read off the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

OURS = {
    "core": set(),
    "algos": {"core"},
    "distill": {"core", "algos"},
    "rollout": {"core", "algos", "distill"},
    "trainer": {"core", "algos", "distill"},
    "cluster": {"core", "algos", "distill", "rollout", "trainer"},
}
"""What each folder may import of ours, besides itself."""

HEAVY = {
    "torch": {"algos", "distill", "rollout", "trainer", "cluster"},
    "numpy": {"algos", "distill", "rollout", "trainer", "cluster"},
    "transformers": {"rollout", "trainer", "cluster"},
    "vllm": {"rollout"},
    "deepspeed": {"trainer"},
    "ray": {"cluster"},
}
"""Which folders may import a heavy package at all; ``core`` may do so inside a function, never when it is imported."""


def imports(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """``(dotted name, line, runs at import time)`` of every import; ``from slipstream import core`` is ``slipstream.core``."""
    stack: list[tuple[ast.AST, bool]] = [(tree, True)]
    while stack:
        node, at_import = stack.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "slipstream" else [module]
            yield from ((name, node.lineno, at_import) for name in names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += [(child, False) for child in node.body] + [(child, at_import) for child in node.orelse]
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            stack += [(child, at_import and not inside) for child in ast.iter_child_nodes(node)]


def violation(folder: str, name: str, at_import: bool) -> str | None:
    """What is wrong with importing ``name`` in ``folder``, if anything."""
    top, *rest = name.split(".")
    if top in OURS:
        return f"bare import of {name}: write slipstream.{name}"
    if not top:
        return f"relative import {name}: write slipstream.…"
    if top == "slipstream":
        target = rest[0] if rest else "…"
        allowed = target == folder or target in OURS[folder]
        return None if allowed else f"{folder} may not import slipstream.{target}"
    if top in HEAVY and folder not in HEAVY[top] and (at_import or folder != "core" or top == "ray"):
        return f"{folder} may not import {top}"
    return None


def violations(root: Path) -> list[str]:
    found = []
    for folder in OURS:
        for path in sorted((root / folder).rglob("*.py")):
            for name, line, at_import in imports(ast.parse(path.read_text(), str(path))):
                problem = violation(folder, name, at_import)
                if problem:
                    found.append(f"{path.relative_to(root)}:{line}: {problem}")
    return found


def test_no_import_goes_against_the_order():
    assert violations(ROOT) == []


def test_every_folder_is_looked_at():
    packages = {path.parent.name for path in ROOT.glob("*/py.typed")}
    assert packages == set(OURS)


@pytest.mark.parametrize(
    ("folder", "source", "problem"),
    [
        ("core", "import torch", "core may not import torch"),
        ("core", "if True:\n    from vllm.config import VllmConfig", "core may not import vllm"),
        ("core", "class A:\n    import transformers", "core may not import transformers"),
        ("core", "try:\n    import deepspeed\nexcept ImportError:\n    pass", "core may not import deepspeed"),
        ("core", "def f():\n    import ray", "core may not import ray"),
        ("core", "def f():\n    from slipstream.algos import kl", "core may not import slipstream.algos"),
        ("core", "import slipstream", "core may not import slipstream.…"),
        ("algos", "from slipstream import distill", "algos may not import slipstream.distill"),
        ("algos", "import transformers", "algos may not import transformers"),
        ("distill", "import slipstream.rollout.engine", "distill may not import slipstream.rollout"),
        ("rollout", "from slipstream.trainer.packing import pack", "rollout may not import slipstream.trainer"),
        ("rollout", "def f():\n    import ray", "rollout may not import ray"),
        ("trainer", "def f():\n    from slipstream.rollout import engine", "trainer may not import slipstream.rollout"),
        ("trainer", "from slipstream.cluster import flow", "trainer may not import slipstream.cluster"),
        ("trainer", "from vllm import LLM", "trainer may not import vllm"),
        ("cluster", "from core.records import Task", "bare import of core.records"),
        ("cluster", "import algos", "bare import of algos"),
        ("cluster", "from . import flow", "relative import"),
    ],
)
def test_planted_violations_are_found(tmp_path, folder, source, problem):
    (tmp_path / folder / "deep").mkdir(parents=True)
    (tmp_path / folder / "deep" / "planted.py").write_text(source)
    (found,) = violations(tmp_path)
    assert found.startswith(f"{folder}/deep/planted.py:") and problem in found


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("core", "def f():\n    import torch"),
        ("core", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("core", "from slipstream.core import records"),
        ("algos", "import torch\nfrom slipstream.core.records import Task"),
        ("trainer", "import deepspeed\nfrom slipstream.distill import divergences"),
        ("cluster", "import ray\nfrom slipstream import rollout, trainer"),
    ],
)
def test_what_is_allowed_is_not_found(tmp_path, folder, source):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "fine.py").write_text(source)
    assert violations(tmp_path) == []
