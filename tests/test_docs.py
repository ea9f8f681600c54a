"""What the docs promise: the reference is the schema's, recipes are valid, links lead somewhere, commands exist."""

import re
import runpy
from pathlib import Path

import pytest

from slipstream.core.recipe import load_recipe

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def test_the_recipe_reference_is_up_to_date() -> None:
    render = runpy.run_path(str(ROOT / "docs" / "make_recipe_reference.py"))["render"]
    assert (ROOT / "docs" / "recipe.md").read_text() == render(), "run python docs/make_recipe_reference.py"


def test_every_key_has_a_meaning() -> None:
    rows = [line for line in (ROOT / "docs" / "recipe.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 150 and [row for row in rows if re.search(r"\|\s*\|$", row)] == []


def test_the_reference_has_a_table_for_every_path_with_the_defaults_of_that_path() -> None:
    """Three optimizers of the same keys differ in their learning rate and its schedule."""
    sections = {part.split("`")[1]: part for part in (ROOT / "docs" / "recipe.md").read_text().split("\n## ") if part[0] == "`"}
    paths = ("algo.critic.optimizer", "warm_start.optimizer", "trainer.optimizer")
    found = [re.findall(r"\| `(?:lr|schedule)` \|.*\| `(.*)` \|", sections[path]) for path in paths]
    assert found == [["1e-05", "constant"], ["1e-05", "cosine"], ["1e-06", "constant"]]
    assert {"algo.correction.icepop", "algo.correction.geometric"} <= sections.keys()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_short(recipe: Path) -> None:
    assert load_recipe([recipe]).name == recipe.stem
    assert len(recipe.read_text().splitlines()) < 60


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_commands_in_the_docs_exist(page: Path) -> None:
    from slipstream.cluster.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    known |= {group.name for group in app.registered_groups}
    asked = set(re.findall(r"^(?:\$ )?slipstream (\w+)", page.read_text(), re.MULTILINE))
    assert asked <= known


def test_the_readme_recipe_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(name: sorter.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    path = tmp_path / "sorter.yaml"
    path.write_text(block)
    assert load_recipe([path]).schedule.max_staleness == 2
