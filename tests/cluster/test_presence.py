"""What a recipe names and is not there is told before anything starts, together with every other mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cluster.presence import absent, located
from slipstream.core.recipe import RecipeError, load_recipe
from slipstream.rollout.generated import gym_names
from slipstream.trainer.folders import checked_folder

GOOD = {"name": "trial", "model.path": "builtin:tiny", "data.source": "builtin:number_sorting"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe's folder, which is not the working directory."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "empty.yaml").write_text("seed: 0\n")
    (folder / "my_rewards.py").write_text("raise SystemExit('imported')\ndef correct(): ...\n")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "1+1", "solution": "2"}) + "\n")
    (folder / "shown.jsonl").write_text(json.dumps({"prompt": "1+1", "completion": "2", "answer": "2"}) + "\n")
    (folder / "verl.jsonl").write_text(json.dumps({"prompt": "1+1", "reward_model": {"ground_truth": "2"}}) + "\n")
    monkeypatch.chdir(tmp_path)
    return folder


def problems(folder: Path, *overrides: str, draft_to_come: bool = True) -> list[str]:
    """``key: text`` of everything that is wrong."""
    given = [f"{key}={value}" for key, value in GOOD.items()]
    try:
        load_recipe(
            [folder / "empty.yaml"], [*given, *overrides], lambda found: absent(found, folder, draft_to_come=draft_to_come)
        )
    except RecipeError as error:
        return [f"{problem.key}: {problem.text}" for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.path=builtin:tinny", "model.path: got 'builtin:tinny', expected 'builtin:tiny', the only builtin model; did"),
        ("model.path=/no/such", "model.path: /no/such is no folder; expected a Hugging Face folder, 'builtin:tiny' or 'pip:"),
        ("model.path=Qwen/Qwen2.5-0.5B", "(`hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B`) and give models"),
        ("model.path=recipe", "model.path: recipe is no folder; expected a Hugging Face folder, 'builtin:tiny' or 'pip:"),
        ("model.path=recipe", "did you mean recipes?"),
        ("model.path=recipes", "model.path: recipes lacks config.json, weights"),
        ("model.path=pip:nowhere", "model.path: distribution 'nowhere' is not installed"),
        ("distill.teacher=nope", "distill.teacher: nope is no folder"),
        ("data.source=builtin:number_sort", "did you mean builtin:number_sorting?"),
        ("data.source=reasoning_gym:chain_sumz", "which reasoning-gym does not have; did you mean chain_sum"),
        ("data.source=mine/no.jsonl", "data.source: mine/no.jsonl does not exist, neither in "),
        ("data.source=row.jsonl", "did you mean rows.jsonl?"),
        ("data.source=openai/gsm8k", "data sets of the hub have to be saved first"),
        ("data.source=recipes", "data.source: recipes is no folder written by datasets"),
        ("data.source=rows.jsonl", "reward.parts[0].function: exact: tasks of rows.jsonl have no answer to compare with"),
        ("data.options={sizee: 3}", "data.options.sizee: unknown key; did you mean `size`?"),
        ("monitor.eval.source=held.jsonl", "monitor.eval.source: held.jsonl does not exist"),
        ("reward.parts=[{function: my_rewrds:correct}]", "but there is no my_rewrds.py beside the recipe in "),
        ("reward.parts=[{function: my_rewrds:correct}]", "did you mean my_rewards?"),
        ("reward.parts=[{function: my_rewards:corect}]", "my_rewards.py has no corect; did you mean correct?"),
        ("rollout.environment.name=games:Chess", "rollout.environment.name: got games:Chess, but there is no games.py"),
        ("rollout.speculation={method: dflash, draft: nope}", "rollout.speculation.draft: nope is no folder"),
        ("rollout.speculation={method: draft_model, draft: builtin:tinny}", "rollout.speculation.draft: got 'builtin:tinny'"),
    ],
)  # fmt: skip
def test_each_thing_that_is_not_there(folder: Path, override: str, expected: str) -> None:
    (found,) = problems(folder, override)
    assert expected in found


def test_supervised_steps_want_demonstrations(folder: Path) -> None:
    expected = "the first row of verl.jsonl has no demonstration; supervised steps need a column `completion`"
    for key, setting in (("warm_start", "warm_start={steps: 3}"), ("algo.name", "algo.name=sft")):
        (found,) = problems(folder, "data.source=verl.jsonl", setting)
        assert found.startswith(f"{key}: {expected}")
        assert problems(folder, "data.source=shown.jsonl", setting) == []
        assert len(problems(folder, "data.source=rows.jsonl", setting)) == 2, "no answer either"


def test_they_come_with_the_mistakes_of_the_schema_and_not_about_a_key_that_is_wrong_itself(folder: Path) -> None:
    found = problems(folder, "seed=-1", "model.path=nope", "data.source=3", "reward.parts=[{function: nope:f}]")
    assert sorted(text.split(":")[0] for text in found) == ["data.source", "model.path", "reward.parts[0].function", "seed"]
    assert len(problems(folder, "data.source=rows.jsonl", "data.options={sizee: 3}", "data.answer_column=nope")) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["reward.parts=[{function: my_rewards:correct}]"],
        ["reward.parts=[{function: json:dumps}]"],  # installed
        ["data.source=rows.jsonl", "data.answer_column=solution"],
        ["data.source=recipes/rows.jsonl", "data.answer_column=solution"],
        ["data.source=verl.jsonl"],
        ["data.source=reasoning_gym:chain_sum", "reward.parts=[{function: reasoning_gym}]"],
        ["data.source=builtin:guess_number", "data.options={numbers: 7}"],
    ],
)
def test_what_is_there_passes(folder: Path, overrides: list[str]) -> None:
    assert problems(folder, *overrides) == []


def test_a_draft_may_be_named_before_it_is_made_but_not_run_with(folder: Path) -> None:
    for method in ("draft_model", "eagle3"):
        speculation = f"rollout.speculation={{method: {method}, draft: models/draft}}"
        assert problems(folder, speculation) == []
        (found,) = problems(folder, speculation, draft_to_come=False)
        assert found.startswith("rollout.speculation.draft: models/draft is no folder") and "`slipstream draft train`" in found
    (found,) = problems(folder, "rollout.speculation={method: eagle3, draft: builtin:tiny}")
    assert "builtin:tiny is no folder" in found and "draft train" not in found
    (found,) = problems(folder, "rollout.speculation={method: ngram, draft: models/draft}")
    assert "drafts from the text so far; remove it" in found, "and not that the draft is missing"


def test_data_beside_the_recipe_are_found_and_those_of_the_working_directory_first(folder: Path) -> None:
    given = [f"{key}={value}" for key, value in GOOD.items()]
    recipe = load_recipe([folder / "empty.yaml"], [*given, "data.source=rows.jsonl", "monitor.eval.source=verl.jsonl"])
    found = located(recipe, folder)
    assert found.data.source == str(folder / "rows.jsonl") and found.monitor.eval.source == str(folder / "verl.jsonl")
    Path("rows.jsonl").write_text("{}")
    assert located(recipe, folder).data.source == "rows.jsonl"


def test_the_names_of_reasoning_gym_are_those_that_it_knows_when_imported() -> None:
    from reasoning_gym.factory import DATASETS

    assert gym_names() == set(DATASETS)


def test_a_complete_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    assert checked_folder(tmp_path, "model.path") == tmp_path
