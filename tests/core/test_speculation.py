"""The section ``rollout.speculation``: every broken rule at once, each with its key, its line and a way out."""

from pathlib import Path

import pytest

from slipstream.core.recipe import RecipeError, load_recipe

GOOD = """name: trial
model: {path: "builtin:tiny"}
data: {source: "builtin:number_sorting"}
"""


def problems(folder: Path, text: str) -> dict[str, str]:
    path = folder / "recipe.yaml"
    path.write_text(GOOD + text)
    with pytest.raises(RecipeError) as caught:
        load_recipe([path])
    return {problem.key: problem.text for problem in caught.value.problems}


def speculation(folder: Path, keys: str, rest: str = "") -> dict[str, str]:
    found = problems(folder, f"rollout:\n  speculation: {{{keys}}}\n{rest}")
    return {key.removeprefix("rollout.speculation."): text for key, text in found.items()}


def test_no_speculation_by_default_and_exact_when_it_is_on(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    chosen = load_recipe([path]).rollout.speculation
    assert (chosen.on, chosen.learns, chosen.lossy) == (False, False, False)
    path.write_text(GOOD + "rollout: {speculation: {method: draft_model, draft: some/folder}}")
    chosen = load_recipe([path]).rollout.speculation
    assert (chosen.draws, chosen.rejection, chosen.learns, chosen.lossy) == ("probabilistic", "standard", False, False)


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    found = speculation(
        tmp_path,
        "method: eagle3, universal: true, sample: greedy, rejection: synthetic, lookup_min: 7, tts: {enabled: true}",
        "  tensor_parallel: 2\n  sampling: {seeded: true}\n",
    )
    assert set(found) == {
        "draft", "universal", "lookup_min", "rejection", "synthetic_length", "method", "tts.enabled",
    }  # fmt: skip
    assert "expected the folder of the draft" in found["draft"]
    assert "allow_lossy: true" in found["rejection"]


@pytest.mark.parametrize(
    ("keys", "key", "says"),
    [
        ("draft: somewhere", "draft", "acts only with a rollout.speculation.method"),
        ("tts: {enabled: true}", "tts", "acts only with a rollout.speculation.method"),
        ("lookahead: dynamic", "lookahead", "acts only with a rollout.speculation.method"),
        ("method: draft_model, draft: d, tts: {share_every_s: 9}", "tts.share_every_s", "acts only with tts.enabled"),
        (
            "method: draft_model, draft: d, tts: {enabled: true, share_every_s: 9}",
            "tts.share_every_s",
            "acts between engines, and rollout.engines is 1",
        ),
        ("method: ngram, draft: somewhere", "draft", "drafts from the text so far; remove it"),
        (
            "method: ngram, tts: {enabled: true}",
            "tts.enabled",
            "got true with method ngram, expected draft_model or eagle3 or dflash",
        ),
        ("method: draft_model, draft: d, universal: true, sample: probabilistic", "sample", "expected greedy"),
        ("method: draft_model, draft: d, universal: true, tts: {enabled: true}", "tts.enabled", "greedy drafts"),
        ("method: ngram, synthetic_length: 2.0", "synthetic_length", "goes with rejection: synthetic"),
        ("method: ngram, tokens: 129", "tokens", "at most 128"),
        ("method: ngram, tokens_by_batch: [[1, 8, 4], [9, 8, 2]]", "tokens_by_batch", "got [9, 8, 2]"),
        (
            "method: ngram, rejection: synthetic, synthetic_length: 9.0, allow_lossy: true",
            "synthetic_length",
            "expected 1 to tokens + 1 = 5",
        ),
        ("method: ngram, tokens_by_batch: [[1, 8, 4], [8, 16, 2]]", "tokens_by_batch", "do not overlap"),
        ("method: ngram, tokens_by_batch: [[9, 16, 4], [1, 8, 2]]", "tokens_by_batch", "begin with 1, ascend"),
        ("method: ngram, tokens_by_batch: [[2, 16, 4]]", "tokens_by_batch", "got requests [[2, 16]]"),
        (
            "method: draft_model, draft: d, lookahead: dynamic, tokens_by_batch: [[1, 8, 4]]",
            "lookahead",
            "got dynamic with tokens_by_batch",
        ),
        (
            "method: dflash, draft: d, tts: {enabled: true}, tokens_by_batch: [[1, 4, 4], [5, 64, 2]]",
            "tokens_by_batch",
            "does not go with tts.enabled and method dflash",
        ),
        ("method: ngram, sample: greedy", "sample", "got greedy with method ngram, whose drafts are certain"),
        ("method: suffix, sample: probabilistic", "sample", "got probabilistic with method suffix"),
        ("method: draft_model, draft: d, lookup_min: 3", "lookup_min", "it acts only with ngram"),
        ("method: suffix, lookup_max: 6", "lookup_max", "it acts only with ngram"),
        ("method: draft_model, draft: d, training: {vocabulary: 9}", "training.vocabulary", "with method draft_model"),
        ("method: draft_model, draft: d, training: {features: [0, 1, 2]}", "training.features", "with method draft_model"),
        ("method: draft_model, draft: d, training: {first_layers: 1, layers: 2}", "training.layers", "remove one"),
        ("method: eagle3, draft: d, training: {first_layers: 1}", "training.first_layers", "with method eagle3"),
        ("method: eagle3, draft: d, training: {hidden_size: 128}", "training.hidden_size", "with method eagle3"),
        ("method: draft_model, draft: d, tts: {enabled: true, lr: 1.5}", "tts.lr", "at most 1"),
    ],
)
def test_one_problem(tmp_path: Path, keys: str, key: str, says: str) -> None:
    found = speculation(tmp_path, keys)
    assert list(found) == [key] and says in found[key]


def test_a_lossy_setting_that_is_allowed_is_lossy(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    lossy = "{method: ngram, rejection: synthetic, synthetic_length: 3.0, allow_lossy: true}"
    path.write_text(GOOD + f"rollout: {{speculation: {lossy}}}")
    assert load_recipe([path]).rollout.speculation.lossy


def test_a_seed_with_drafts_that_depend_on_others_is_refused(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        "rollout: {sampling: {seeded: true}, speculation: {method: draft_model, draft: d}}",
    )
    assert "a seed does not fix the response" in found["rollout.speculation.method"]


@pytest.mark.parametrize("key", ["min_p: 0.1", "logit_bias: 1.0"])
def test_sampling_that_vllm_cannot_verify_drafts_under_is_no_key(tmp_path: Path, key: str) -> None:
    found = problems(tmp_path, f"rollout: {{sampling: {{{key}}}, speculation: {{method: ngram}}}}")
    assert "unknown key" in found[f"rollout.sampling.{key.partition(':')[0]}"]


@pytest.mark.parametrize(
    "keys",
    [
        "method: ngram, lookup_min: 3, tokens_by_batch: [[1, 8, 4], [17, 32, 2]]",
        "method: eagle3, draft: d, training: {features: [0, 1, 2], vocabulary: 48}",
        "method: draft_model, draft: d, training: {first_layers: 1}, tts: {enabled: true, lr: 1.0}",
        "method: suffix",
    ],
)
def test_a_recipe_written_out_with_every_default_loads_again(tmp_path: Path, keys: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD + f"rollout: {{speculation: {{{keys}}}}}")
    recipe = load_recipe([path])
    again = tmp_path / "again.yaml"
    again.write_text(recipe.model_dump_json())
    assert load_recipe([again]) == recipe
