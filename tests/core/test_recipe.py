"""The recipe loader: one run shows every mistake with its place, and no recipe can run code or read a secret."""

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.core.algorithms import PRESETS
from slipstream.core.other_trainers import TRL, VERL
from slipstream.core.recipe import RecipeError, dump_recipe, load_recipe
from slipstream.core.recipe_problems import section_at
from slipstream.core.schema import Recipe

GOOD = """
name: trial
model: {path: "builtin:tiny"}
data: {source: "builtin:number_sorting"}
"""


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def problems(folder: Path, text: str, overrides: tuple[str, ...] = ()) -> list[str]:
    """``line key: text`` of each problem of a bad recipe."""
    path = write(folder, text)
    with pytest.raises(RecipeError) as caught:
        load_recipe([path], overrides)
    return [str(problem).removeprefix(f"{path}:").strip() for problem in caught.value.problems]


def only(folder: Path, text: str, overrides: tuple[str, ...] = ()) -> str:
    found = problems(folder, text, overrides)
    assert len(found) == 1, found
    return found[0]


def test_a_short_recipe_gets_the_vetted_defaults(tmp_path: Path) -> None:
    recipe = load_recipe([write(tmp_path, GOOD)])
    assert (recipe.name, recipe.schedule.max_staleness, recipe.schedule.on_stale) == ("trial", 2, "mask")


def test_five_mistakes_are_five_problems_each_with_its_line(tmp_path: Path) -> None:
    text = (
        "name: on\n"  # 1: YAML 1.1 boolean
        "model: {path: 'builtin:tiny'}\n"
        "data: {source: 'builtin:number_sorting'}\n"
        "schedule:\n"
        "  max_stalenes: 3\n"  # 5: unknown
        "  steps: -5\n"  # 6: range
        "  on_stale: masc\n"  # 7: choice
        "algo:\n"
        "  kl: {coefficient: 0.1, estimator: k1}\n"  # 9: rule between keys
    )
    name, unknown, steps, choice, rule = problems(tmp_path, text)
    assert name.startswith("1: name: got true, expected text") and "quote it" in name
    assert unknown == "5: schedule.max_stalenes: unknown key; did you mean `max_staleness`?"
    assert steps == "6: schedule.steps: got -5, expected a number greater than 0"
    assert choice.startswith("7: schedule.on_stale: got 'masc'") and "did you mean mask?" in choice
    assert rule.startswith("9: algo.kl.estimator: k1 in the loss has zero expected gradient")


def test_cross_checks_run_beside_other_mistakes_but_never_on_a_key_that_is_wrong_itself(tmp_path: Path) -> None:
    text = GOOD + "seed: x\nschedule: {group_size: 1}\n"
    assert [p.split(":")[1].strip() for p in problems(tmp_path, text)] == ["seed", "schedule.group_size"]
    # minibatches 9 > the default groups_per_step 8, but groups_per_step is itself wrong: nothing is known about it
    text = GOOD + "algo: {minibatches: 9}\nschedule: {groups_per_step: x}\n"
    assert only(tmp_path, text).startswith("6: schedule.groups_per_step: got 'x'")


@pytest.mark.parametrize(
    "wrong",
    [
        "name: on\nmodel: {path: x}\ndata: {source: y}\n",
        "name: n\nmodel: {path: 3}\ndata: {source: y}\n",
        "name: n\nmodel: {path: x}\ndata: {source: 3}\n",
        "name: ???\nmodel: {path: x}\ndata: {source: y}\n",
        "name: n\nmodel: 3\ndata: {source: y}\n",
        "model: {path: x}\ndata: {source: y}\n",
        "name: n\nmodel: {path: x}\ndata: {source: y}\nwarm_start: {steps: 0}\n",
        "name: n\nmodel: {path: x}\ndata: {source: y}\nreward: {parts: [{function: 1}]}\n",
        "name: n\nmodel: {path: x}\ndata: {source: y}\nalgo: {correction: {icepop: {low: 0.5}}}\n",
        "name: n\nmodel: {path: x}\ndata: {source: y}\nseed: x\n",
    ],
)
def test_a_wrong_required_key_hides_no_rule_between_the_others(tmp_path: Path, wrong: str) -> None:
    text = f"{wrong}schedule: {{group_size: 500}}\nrollout: {{sampling: {{seeded: true}}, speculation: {{method: suffix}}}}\n"
    keys = [p.removeprefix(p.split(" ")[0] if p[0].isdigit() else "").split(":")[0].strip() for p in problems(tmp_path, text)]
    assert len(keys) == 3 and {"schedule.group_size", "rollout.speculation.method"} < set(keys), keys


def test_a_rule_about_a_wrong_key_of_its_own_section_is_not_told(tmp_path: Path) -> None:
    """`max_staleness + 1 = 3` would be about the default, which the user never wrote."""
    text = GOOD + "schedule: {publish_every: 5, max_staleness: x}\n"
    assert only(tmp_path, text).startswith("5: schedule.max_staleness: got 'x'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("group_size: 4", "5: group_size: unknown key; did you mean `schedule.group_size`?"),
        ("reward: {parts: [{function: exact, weigth: 2}]}", "5: reward.parts[0].weigth: unknown key; did you mean `weight`?"),
        ("schedule: {steps: 2.0}", "5: schedule.steps: got 2.0, expected an integer; write 2"),
        ("schedule: {steps: '20'}", "5: schedule.steps: got '20', expected an integer; remove the quotes"),
        ("schedule: {steps: true}", "5: schedule.steps: got true, expected an integer"),
        ("trainer: {zero_stage: true}", "5: trainer.zero_stage: got true, expected an integer"),
        ("rollout: 3", "5: rollout: got 3, expected a section, that is keys and values"),
        ("monitor:", "5: monitor: got null, expected a section, that is keys and values"),
        ("trainer: {optimizer: {lr: .nan}}", "5: trainer.optimizer.lr: got .nan, expected a finite number"),
        ("trainer:\n  optimizer:\n    betas: [0.9, 2]", "7: trainer.optimizer.betas[1]: got 2, expected a number less than 1"),
        ("trainer: {optimizer: {betas: [0.9, 1]}}", "5: trainer.optimizer.betas[1]: got 1, expected a number less than 1"),
        ("seed: 9223372036854775808", "5: seed: got 9223372036854775808, expected a number at most 9.22337e+18"),
        ("rollout: {sampling: {stop: ['']}}", "5: rollout.sampling.stop[0]: got '', expected text that is not empty"),
        (
            "rollout: {sampling: {temperature: 0.005}}",
            "5: rollout.sampling.temperature: got 0.005, expected at least 0.01: vLLM would sample at 0.01 all the same",
        ),
        ("schedule: {lag_decay: 1.0e-20}", "5: schedule.lag_decay: got 1e-20, expected at least 0.001: a lagging token's"),
        ("schedule: {kv_lag_decay: 1.0e-4}", "5: schedule.kv_lag_decay: got 0.0001, expected at least 0.001: a lagging"),
        ("seed: 1\nseed: 2", "6: seed: the key stands twice, first at "),
        ("seed: ???", "5: seed: must be given"),
        ("seed: ${scheduel.steps}", "5: seed: the reference cannot be resolved"),
        ("seed: ${seed}", "5: seed: the reference cannot be resolved"),
        ("seed: ${a", "5: seed: got '${a', expected a reference"),
        ("on: 3", "5: the key `on` is read as a boolean"),
        ("seed: !!python/object/apply:os.system [echo]", "5: seed: got the YAML tag"),
        ("seed: !!binary aGk=", "5: seed: got the YAML tag"),
        ("warm_start: {}", "5: warm_start.steps: missing; add `steps: …`"),
        ("seed: [1", "6: not valid YAML: "),
        ("  seed: 1", "5: not valid YAML: "),
        ("'!!': 1", "5: !!: unknown key"),
        ("seed: &a [*a]", "5: seed: nested too deeply"),
    ],
)
def test_each_kind_of_mistake(tmp_path: Path, text: str, expected: str) -> None:
    assert only(tmp_path, f"{GOOD}{text}\n").startswith(expected)


def test_built_ins_are_checked_with_the_rest_and_nothing_of_the_users_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    text = (
        "seed: -1\nrollout:\n  environment: {name: calculator, options: {open: '('}}\nreward:\n  parts:\n"
        "    - {function: exct}\n    - {function: regex, options: {pattern: x}}\n    - {function: 'mine:f', options: {a: 1}}\n"
    )
    seed, *found = problems(tmp_path, GOOD + text)
    assert seed.startswith("5: seed: got -1") and len(found) == 3
    assert "7: rollout.environment.options.open: unknown key; did you mean `opening`?" in found
    assert any(p.startswith("10: reward.parts[0].function: got 'exct'") and p.endswith("did you mean exact?") for p in found)
    assert any(p.startswith("11: reward.parts[1].options.pattern: got 'x' with 0 groups") for p in found)
    found = problems(tmp_path, GOOD + "rollout: {environment: {name: calculater}}\n")
    assert found[0].startswith("5: rollout.environment.name: got 'calculater'") and found[0].endswith(
        "did you mean calculator?"
    )
    load_recipe([write(tmp_path, GOOD + "rollout: {environment: {name: 'mine:Env', options: {a: 1}}}\n")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_generations: 8", "5: num_generations: unknown key; TRL's num_generations is `schedule.group_size` here"),
        ("trainer: {learning_rate: 1}", "5: trainer.learning_rate: unknown key; TRL's learning_rate is `trainer.optimizer.lr`"),
        ("algo: {beta: 0.04}", "5: algo.beta: unknown key; TRL's beta is `algo.kl.coefficient` here"),
        ("algo: {epsilon: 0.2}", "5: algo.epsilon: unknown key; TRL's epsilon is `algo.clip_low` here"),
        ("temperature: 1.0", "5: temperature: unknown key; TRL's temperature is `rollout.sampling.temperature` here"),
        ("trainer: {optimizer: {beta: [0.9, 0.9]}}", "5: trainer.optimizer.beta: unknown key; did you mean `betas`?"),
        ("algorithm: {adv_estimator: grpo}", "5: algorithm: unknown key; verl's algorithm.adv_estimator is `algo.name` here"),
        (
            "actor_rollout_ref: {rollout: {n: 8}, actor: {optim: {lr: 1}}}",
            "5: actor_rollout_ref: unknown key; verl's actor_rollout_ref.rollout.n is `schedule.group_size`, verl's "
            "actor_rollout_ref.actor.optim.lr is `trainer.optimizer.lr` here",
        ),
    ],
)
def test_keys_of_other_trainers_are_known_for_what_they_are_here(tmp_path: Path, text: str, expected: str) -> None:
    assert only(tmp_path, f"{GOOD}{text}\n").startswith(expected)


def test_what_other_trainers_keys_are_called_here_exists() -> None:
    for path in {*TRL.values(), *VERL.values()}:
        section = section_at(tuple(path.split(".")[:-1]), Recipe)
        assert section is not None and path.split(".")[-1] in section.model_fields, path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reward: {parts: []}", "5: reward.parts: got an empty list, expected at least 1 item"),
        ("trainer: {optimizer: {betas: [0.9]}}", "5: trainer.optimizer.betas[1]: missing; the list has too few items"),
        ("trainer: {optimizer: {betas: [0.9, 0.9, 0.9]}}", "5: trainer.optimizer.betas: got a list, expected at most 2 items"),
        (
            "reward: {parts: [{function: exact, options: {after: ''}}]}",
            "5: reward.parts[0].options.after: got '', expected text ",
        ),
    ],
)
def test_lengths_are_told_in_our_words(tmp_path: Path, text: str, expected: str) -> None:
    assert only(tmp_path, f"{GOOD}{text}\n").startswith(expected)


def test_missing_sections_and_unusable_files(tmp_path: Path) -> None:
    missing = problems(tmp_path, "name: x\n")
    assert missing == ["data: missing; add `data: …`", "model: missing; add `model: …`"]
    assert "got an empty file" in only(tmp_path, "# nothing\n")
    assert "expected keys and values" in only(tmp_path, "- a\n- b\n")
    assert "expected at most 131072" in only(tmp_path, "# " + "x" * 131072)
    for path, message in ((tmp_path / "none.yaml", "no such recipe file"), (tmp_path, "cannot be read")):
        with pytest.raises(RecipeError, match=message):
            load_recipe([path])


def test_ten_lines_of_aliases_are_refused_instead_of_expanded(tmp_path: Path) -> None:
    bomb = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    start = time.process_time()
    assert "more than 20000 values" in problems(tmp_path, GOOD + bomb)[0]
    assert time.process_time() - start < 20  # 2 to 5 s; expanded, they are 10¹⁰ values


@pytest.mark.parametrize(
    "attack",
    [
        "${oc.env:HOME}",
        "${oc.coerce:evil_module.X,3}",
        "${oc.create:{a: 1}}",
        "${oc.decode:1}",
        "pre ${oc.env:HOME,none} post",
        "${${name}:x}",
        "\\\\${oc.env:HOME}",
        "${a.${oc.env:HOME}}",
    ],
)
def test_resolvers_never_run(tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = only(tmp_path, f"{GOOD}rollout: {{sampling: {{stop: ['{attack}']}}}}\n")
    assert message.startswith("5: rollout.sampling.stop[0]: got `${") and "recipes are data" in message
    message = only(tmp_path, GOOD, (f"data.options.x={attack!r}",))
    assert "data.options.x" in message and "recipes are data" in message


def test_files_merge_left_to_right_and_overrides_win(tmp_path: Path) -> None:
    base = write(tmp_path, GOOD + "schedule: {steps: 10, group_size: 4}\n")
    over = write(tmp_path, "schedule: {steps: 20}\nseed: ${schedule.steps}\n", "over.yaml")
    recipe = load_recipe([base, over], ["schedule.steps=30", "schedule.steps=40", "reward.parts=[{function: math}]"])
    assert (recipe.schedule.steps, recipe.schedule.group_size, recipe.seed) == (40, 4, 40)
    assert [part.function for part in recipe.reward.parts] == ["math"]
    recipe = load_recipe(
        [base], ["warm_start={steps: 3}", "warm_start.batch_size=5", "checkpoint.every=null", "data.options.a=[1]"]
    )
    assert recipe.warm_start is not None and (recipe.warm_start.steps, recipe.warm_start.batch_size) == (3, 5)
    assert recipe.data.options == {"a": [1]} and recipe.checkpoint.every is None
    two = load_recipe([base], ["reward={parts: [{function: exact}, {function: reasoning_gym}]}", "reward.parts[1].weight=0.5"])
    assert [part.weight for part in two.reward.parts] == [1.0, 0.5]


def test_mistakes_in_overrides_name_the_command_line(tmp_path: Path) -> None:
    overrides = ("schedule.steps", "=3", "schedule.step=2", "seed=-1", "data.options.a=[1", "schedule.groups_per_step=")
    found = problems(tmp_path, GOOD, overrides)
    assert len(found) == 6 and all(text.startswith("command line: ") for text in found)
    assert any("schedule.step: unknown key; did you mean `steps`?" in text for text in found)
    assert any("schedule.groups_per_step: got null" in text for text in found)


def test_numbers_and_lists_are_read_as_people_write_them(tmp_path: Path) -> None:
    text = GOOD + "trainer: {optimizer: {lr: 1e-5, betas: [0.9, 0.99], weight_decay: 0}}\n"
    optimizer = load_recipe([write(tmp_path, text)]).trainer.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (1e-5, (0.9, 0.99), 0.0)


def test_the_dump_loads_again_and_holds_no_secret(tmp_path: Path) -> None:
    text = GOOD + (
        "warm_start: {steps: 3, optimizer: {lr: 3e-7}}\nrollout: {sampling: {stop: ['1e-6', 'on', '\\${x}', 'a: b']}}\n"
        "reward: {parts: [{function: 'mine:f', options: {after: '=', nested: {a: 1}}}]}\n"
    )
    recipe = load_recipe([write(tmp_path, text)])
    assert recipe.rollout.sampling.stop == ["1e-6", "on", "${x}", "a: b"]
    assert load_recipe([write(tmp_path, dump_recipe(recipe), "again.yaml")]) == recipe

    secret = [
        "data.options.hf_token=hush",
        "data.options.max_tokens=5",
        "reward.parts=[{function: 'mine:f', options: {a: {api_key: hush}}}]",
    ]
    dumped = dump_recipe(load_recipe([write(tmp_path, GOOD)], secret))
    assert "hush" not in dumped and "max_tokens: 5" in dumped
    found = problems(tmp_path, dumped)
    assert len(found) == 2 and all("the secret was removed from this file" in text for text in found)
    assert "reward.parts[0].options.a.api_key=…" in only(tmp_path, dumped, ("data.options.hf_token=hush",))


@pytest.mark.parametrize(
    "name",
    ["token", "hf_token", "api-token", "authToken", "ACCESS_TOKEN", "bearer", "my_secret", "password", "apikey", "credentials"],
)
def test_what_a_secret_is_called(tmp_path: Path, name: str) -> None:
    assert "hush" not in dump_recipe(load_recipe([write(tmp_path, GOOD)], [f"data.options={{{name}: hush}}"]))


@pytest.mark.parametrize("name", ["end_token", "tokenizer", "hf_tokenizer", "eos_token", "tokens_per_s"])
def test_what_no_secret_is_called_stays_in_the_resolved_recipe(tmp_path: Path, name: str) -> None:
    recipe = load_recipe([write(tmp_path, GOOD)], [f"data.options={{{name}: a}}"])
    assert load_recipe([write(tmp_path, dump_recipe(recipe), "again.yaml")]) == recipe


def test_loading_is_fast_and_imports_nothing_heavy(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    code = (
        "import sys, time; start = time.process_time(); from pathlib import Path\n"
        "from slipstream.core.recipe import load_recipe\n"
        f"load_recipe([Path({str(path)!r})])\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy), time.process_time() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    heavy, seconds = done.stdout.rsplit(" ", 1)
    assert heavy == "[]" and math.isfinite(float(seconds)) and float(seconds) < 2.0, done.stdout


def test_a_name_presets_the_rest_and_every_part_can_be_set(tmp_path: Path) -> None:
    text = GOOD + "algo: {name: gspo, clip_high: 0.01, correction: {cap: 3}}\n"
    algo = load_recipe([write(tmp_path, text)]).algo
    assert (algo.loss, algo.reduction, algo.clip_low, algo.clip_high) == ("gspo", "sequence_mean", 3e-4, 0.01)
    assert (algo.correction.weight, algo.correction.cap) == ("geometric", 3.0), (
        "one key of a section leaves the preset's others"
    )
    algo = load_recipe([write(tmp_path, GOOD)], ["algo.name=dapo", "algo.overlong.filter=false"]).algo
    assert (algo.clip_low, algo.clip_high, algo.overlong.filter, algo.overlong.soft) == (0.2, 0.28, False, 0.2)


def test_one_key_of_an_optimizer_leaves_the_defaults_of_its_section(tmp_path: Path) -> None:
    text = (
        GOOD
        + "algo: {name: ppo, critic: {optimizer: {warmup_steps: 5}}}\nwarm_start: {steps: 2, optimizer: {warmup_steps: 20}}\n"
    )
    recipe = load_recipe([write(tmp_path, text)], ["trainer.optimizer.warmup_steps=7"])
    assert recipe.algo.critic is not None and recipe.warm_start is not None
    found = [
        o.model_dump(include={"lr", "schedule", "warmup_steps"})
        for o in (recipe.algo.critic.optimizer, recipe.warm_start.optimizer, recipe.trainer.optimizer)
    ]
    assert found == [
        {"lr": 1e-5, "schedule": "constant", "warmup_steps": 5},
        {"lr": 1e-5, "schedule": "cosine", "warmup_steps": 20},
        {"lr": 1e-6, "schedule": "constant", "warmup_steps": 7},
    ]


def test_a_response_may_have_the_tokens_of_all_its_turns(tmp_path: Path) -> None:
    """What ``constant`` divides by and ``overlong.soft`` measures: 10 tokens a turn, and 3 turns where somebody answers."""
    rollout = "rollout: {{sampling: {{max_tokens: 10}}, environment: {{name: {}, max_turns: 3}}}}\n"
    found = [load_recipe([write(tmp_path, GOOD + rollout.format(name))]) for name in ("single_turn", "calculator")]
    assert [recipe.response_tokens(2048) for recipe in found] == [10, 30]
    assert found[1].response_tokens(24) == 24, "and never more than the context"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reward: {parts: [{function: environment}]}", "reward.parts: environment: single_turn has no score"),
        (
            "algo: {name: reinforce}\nschedule: {group_size: 1, groups_per_step: 1}",
            "schedule.groups_per_step: got 1 group of 1",
        ),
        (
            "rollout: {environment: {name: calculator, max_turns: 30}}",
            "cluster.stall_timeout_s: got 600 s, expected more than rollout.environment.max_turns · timeout_s = 900 s",
        ),
        (
            "algo: {epochs: 2, proximal: loglinear, max_inner_kl: 0.1}",
            "algo.max_inner_kl: does not go with algo.proximal: loglinear",
        ),
        (
            "schedule: {kv_on_update: recompute, max_kv_lag: 4}",
            "schedule.max_kv_lag: does not go with kv_on_update: recompute",
        ),
        (
            "schedule: {kv_on_update: recompute, kv_lag_decay: 0.5}",
            "schedule.kv_lag_decay: does not go with kv_on_update: recompute",
        ),
        ("schedule: {max_kv_lag: 1}", "schedule.max_kv_lag: got 1, expected at least max_staleness = 2"),
        (
            "reward: {parts: [{function: exact, weight: 0}, {function: math, weight: 0}]}",
            "reward.parts: got weight 0 for each, expected another for one: algo.advantage grpo learns from their sum",
        ),
        (
            "reward: {parts: [{function: exact}, {function: math}], timeout_s: 600}",
            "cluster.stall_timeout_s: got 600 s, expected more than reward.timeout_s = 600 s",
        ),
        ("algo: {name: dppo, clip_high: 4}", "algo.clip_high: got 4, expected at most 1 with loss dppo_tv"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in only(tmp_path, f"{GOOD}{text}\n")


@pytest.mark.parametrize(
    "text",
    [
        "reward: {parts: [{function: exact, weight: 0}]}\nalgo: {name: sft}",
        "reward: {parts: [{function: exact, weight: 0}]}\ndistill: {teacher: t}",
        "reward: {parts: [{function: exact}], timeout_s: 600}",  # no process, and no clock
        "algo: {name: dppo, clip_high: 1}",
        "rollout: {sampling: {temperature: 0.01}}\nschedule: {lag_decay: 1.0e-3}\nseed: 9223372036854775807",
    ],
)
def test_settings_that_do_not(tmp_path: Path, text: str) -> None:
    recipe = load_recipe([write(tmp_path, f"{GOOD}{text}\n")])
    assert load_recipe([write(tmp_path, dump_recipe(recipe), "again.yaml")]) == recipe


def test_weights_are_published_before_the_slots_run_out(tmp_path: Path) -> None:
    """With η = 2 there are slots for three batches: a fourth would wait for a publication that waits for it."""
    load_recipe([write(tmp_path, GOOD + "schedule: {max_staleness: 2, publish_every: 3}\n")])
    found = only(tmp_path, GOOD + "schedule: {max_staleness: 2, publish_every: 4}\n")
    assert "schedule.publish_every: got 4, expected at most max_staleness + 1 = 3" in found


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_holds_and_its_resolved_recipe_loads_again(tmp_path: Path, name: str) -> None:
    teacher = ["distill.teacher=builtin:tiny"] if name == "opd" else []
    recipe = load_recipe([write(tmp_path, GOOD)], [f"algo.name={name}", *teacher])
    assert load_recipe([write(tmp_path, dump_recipe(recipe), "again.yaml")]) == recipe


def test_a_name_over_a_resolved_recipe_is_refused_where_it_would_be_a_label(tmp_path: Path) -> None:
    """Its own keys win, and a resolved recipe has all of them: grpo's clip and overlong under the name of dapo."""
    resolved = dump_recipe(load_recipe([write(tmp_path, GOOD)]))
    found = only(tmp_path, resolved, ("algo.name=dapo",))
    assert found.startswith("command line: algo.name: got dapo, over a recipe for grpo that sets what it stands for")
    remedy = "algo.clip_high=0.28 algo.overlong.filter=true algo.overlong.soft=0.2"
    assert f"({remedy})" in found
    algo = load_recipe([write(tmp_path, resolved)], [*remedy.split(), "algo.name=dapo"]).algo
    assert algo == load_recipe([write(tmp_path, GOOD)], ["algo.name=dapo"]).algo
    mine = load_recipe(
        [write(tmp_path, resolved)], ["algo={name: dapo, clip_high: 0.3}", "algo.overlong={filter: false, soft: null}"]
    ).algo
    assert (mine.name, mine.clip_high, mine.overlong.filter) == ("dapo", 0.3, False), "set beside the name, they are wanted"
    dapo = dump_recipe(load_recipe([write(tmp_path, GOOD)], ["algo.name=dapo"]))
    assert "algo.clip_high=0.2 algo.overlong.filter=false algo.overlong.soft=null" in only(tmp_path, dapo, ("algo.name=grpo",))
    over = write(tmp_path, "algo: {name: gspo}\n", "over.yaml")
    with pytest.raises(RecipeError, match=r"over\.yaml:1: algo\.name: got gspo"):
        load_recipe([write(tmp_path, resolved), over])
    for same in (["algo.name=grpo"], ["algo.name=sft"]):
        load_recipe([write(tmp_path, resolved)], same)
    cispo = only(tmp_path, GOOD + "algo: {clip_high: 0.3}\n", ("algo.name=cispo",))
    assert "(algo.clip_high=4.0)" in cispo, "what the file sets by hand, too, is not silently kept"


def test_the_default_is_grpo_as_it_always_was(tmp_path: Path) -> None:
    algo = load_recipe([write(tmp_path, GOOD)]).algo
    assert algo == load_recipe([write(tmp_path, GOOD)], ["algo.name=grpo"]).algo
    assert (algo.advantage, algo.loss, algo.clip_low, algo.clip_high, algo.dual_clip) == (
        "grpo",
        "clipped_surrogate",
        0.2,
        0.2,
        None,
    )
    assert (algo.reduction, algo.correction.weight, algo.correction.cap, algo.correction.reject) == (
        "token_mean",
        "token",
        2.0,
        [],
    )


def test_contradictions_of_an_algorithm_are_all_reported(tmp_path: Path) -> None:
    algo = (
        "algo:\n  name: gspo\n  reduction: constant\n  clip_low: null\n  dual_clip: 1.0001\n  max_inner_kl: 0.1\n"
        "  proximal: loglinear\n  correction: {reject: [opsm]}\nschedule: {group_size: 1}\n"
    )
    found = problems(tmp_path, GOOD + algo)
    keys = ["reduction", "clip_low", "dual_clip", "max_inner_kl", "correction.reject"]
    assert [p.split(": ")[1] for p in found] == [*(f"algo.{key}" for key in keys), "schedule.group_size"]
    assert "weigh it by length" in found[0] and "loglinear has none" in found[4] and "compares siblings" in found[5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{clip_low: 1.0}", "5: algo.clip_low: got 1.0, expected a number less than 1"),
        ("{clip_low: null}", "5: algo.clip_low: got null, expected a number with loss clipped_surrogate"),
        ("{name: cispo, dual_clip: 9}", "5: algo.dual_clip: loss cispo has no dual clip"),
        ("{name: grop}", "5: algo.name: got 'grop', expected 'grpo'"),
        ("{name: [a]}", "5: algo.name: got a list"),
        ("{correction: 3}", "5: algo.correction: got 3, expected a section"),
        ("{name: gspo, correction: 3}", "5: algo.correction: got 3, expected a section"),
        (
            "{correction: {icepop: {low: 5, high: 0.5}}}",
            "5: algo.correction.icepop.low: got a band from 5 to 0.5",
        ),
        ("{correction: {geometric: {low: 1.1, high: 2}}}", "5: algo.correction.geometric.low: got a band from 1.1 to 2"),
        ("{correction: {reject: [icepops]}}", "5: algo.correction.reject[0]: got 'icepops'"),
        ("{kl: {refresh_every: 5}}", "5: algo.kl.refresh_every: there is no reference without a KL term"),
        (
            "{proximal: behaviour}",
            "5: algo.correction.weight: got token with algo.proximal: behaviour, expected none: the loss divides by π_b",
        ),
        (
            "{proximal: behaviour, correction: {weight: none, reject: [icepop]}}",
            "5: algo.correction.reject: does not go with algo.proximal: behaviour: it looks at π_prox/π_b, which is 1",
        ),
        (
            "{proximal: behaviour, correction: {weight: none}, epochs: 2, max_inner_kl: 0.1}",
            "5: algo.max_inner_kl: does not go with algo.proximal: behaviour: the lag would count as drift",
        ),
        (
            "{kl: {coefficient: 0.1, placement: reward, estimator: k3}}",
            "5: algo.kl.estimator: k3 in the reward is biased; use k1, or placement: loss",
        ),
        (
            "{kl: {placement: [loss, reward], coefficient: 0.1}}",
            "5: algo.kl.placement: got a list, expected 'loss' or 'reward'",
        ),
        (
            "{name: sft, correction: {weight: sequence}}",
            "5: algo.correction: does not go with algo.name sft: demonstrations have no log-probs of a sampler",
        ),
        ("{name: sft, kl: {coefficient: 0.1}}", "5: algo.kl.coefficient: sft has no RL stream"),
        ("{scale_by_std: false}", "5: algo.scale_by_std: unknown key"),
    ],
)
def test_each_mistake_of_an_algorithm(tmp_path: Path, text: str, expected: str) -> None:
    assert only(tmp_path, f"{GOOD}algo: {text}\n").startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "algo: {name: opd}",
            "distill.teacher: got null, expected a model to learn from: algo.name opd trains on nothing else",
        ),
        ("algo: {advantage: none}", "distill.teacher: got null, expected a model to learn from: algo.advantage none"),
        ("distill: {teacher: t}\nalgo: {name: sft}", "distill.teacher: sft has no rollouts for a teacher to judge"),
        (
            "distill: {teacher: t}\nalgo: {name: opd, kl: {coefficient: 0.1}}",
            "algo.kl.coefficient: acts on the RL stream, and with algo.advantage none there is none",
        ),
        (
            "distill: {teacher: t}\nalgo: {name: opd, correction: {reject: [icepop]}}",
            "algo.correction.reject: acts on the RL stream",
        ),
        (
            "distill: {teacher: t, form: policy_gradient}\n"
            "algo: {name: opd, kl: {coefficient: 0.1, placement: reward, estimator: k1}}",
            "algo.kl.placement: got reward with algo.advantage none: rewards train nothing",
        ),
        (
            "distill: {teacher: t, form: policy_gradient}\nalgo: {name: gspo}",
            "distill.form: got policy_gradient with algo.loss gspo: its one ratio per response",
        ),
        ("distill: {form: policy_gradient}", "distill.form: got policy_gradient, and there is no teacher"),
        ("distill: {coefficient: 0.5}\nalgo: {name: sft}", "distill.coefficient: got 0.5, and there is no teacher"),
        ("distill: {teacher: t, coefficient: 0}", "distill.coefficient: got 0, expected a number greater than 0"),
        ("distill: {teacher: t, form: forward}", "distill.form: got 'forward', expected 'full' or 'policy_gradient'"),
    ],
)
def test_each_mistake_of_a_distillation(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in only(tmp_path, f"{GOOD}{text}\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("algo: {advantage: gae}", "algo.critic: got null, expected a critic with algo.advantage gae; add `critic: {}`"),
        ("algo: {name: ppo, critic: null}", "algo.critic: got null, expected a critic"),
        ("algo: {critic: {}}", "algo.critic: is for advantage gae, got grpo"),
        ("algo: {name: ppo, advantage: grpo, critic: null, gae: {lam: 0.9}}", "algo.gae: is for advantage gae, got grpo"),
        ("algo: {name: ppo, gae: {gamma: 1.01}}", "algo.gae.gamma: got 1.01, expected a number at most 1"),
        ("algo: {name: ppo, gae: {lam: -0.1}}", "algo.gae.lam: got -0.1, expected a number at least 0"),
        ("algo: {name: ppo, gae: {lambda: 0.9}}", "algo.gae.lambda: unknown key"),
        (
            "algo: {name: ppo, loss: gspo, reduction: sequence_mean}",
            "algo.loss: got gspo with algo.advantage gae: its one ratio",
        ),
        (
            "algo: {name: ppo, kl: {target: 5}}",
            "algo.kl.coefficient: got 0 with algo.kl.target, expected a number to start from",
        ),
        (
            "algo: {name: ppo, kl: {coefficient: 0.1, target: 5, placement: loss, estimator: k3}}",
            "algo.kl.target: does not go with algo.kl.placement: loss",
        ),
        (
            "algo: {name: ppo, kl: {coefficient: 0.1, placement: [loss, reward]}}",
            "algo.kl.placement: got a list, expected 'loss' or 'reward'",
        ),
        (
            "algo: {name: ppo, kl: {coefficient: 0.1, target: 5, horizon: 63}}",
            "algo.kl.horizon: got 63, expected at least the 64",
        ),
        ("algo: {name: ppo, critic: {warmup_batches: 100}}", "algo.critic.warmup_batches: got 100, expected less than"),
        ("algo: {name: ppo, critic: {clip: 0}}", "algo.critic.clip: got 0, expected a number greater than 0"),
        ("algo: {name: sft, critic: {}}", "algo.critic: sft has no rewards for a critic to predict"),
        (
            "algo: {name: ppo}\ndistill: {teacher: t, form: policy_gradient}",
            "distill.form: got policy_gradient with algo.advantage gae: the learner makes its advantages",
        ),
    ],
)
def test_each_mistake_of_a_critic(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in only(tmp_path, f"{GOOD}{text}\n")


def test_contradictions_around_a_critic_are_all_reported(tmp_path: Path) -> None:
    text = (
        "algo: {advantage: gae, loss: gspo, reduction: sequence_mean, kl: {target: 5, horizon: 2}}\n"
        "distill: {teacher: t, form: policy_gradient}\n"
    )
    keys = [p.split(": ")[1] for p in problems(tmp_path, GOOD + text)]
    section = ["algo.critic", "algo.kl.coefficient", "algo.kl.horizon", "algo.kl.target", "algo.loss"]
    assert sorted(keys) == [*section, "distill.form"]


def test_ppo_is_a_preset_of_parts(tmp_path: Path) -> None:
    algo = load_recipe([write(tmp_path, GOOD)], ["algo.name=ppo"]).algo
    assert (algo.advantage, algo.loss, algo.kl.placement, algo.kl.estimator) == ("gae", "clipped_surrogate", "reward", "k1")
    assert algo.critic is not None and (algo.critic.optimizer.lr, algo.critic.clip, algo.critic.path) == (1e-5, 0.2, None)
    text = GOOD + "algo: {name: ppo, critic: {optimizer: {lr: 1.0e-3, betas: [0.9, 0.98]}, clip: null}, gae: {lam: 1}}\n"
    recipe = load_recipe([write(tmp_path, text)], ["algo.critic.warmup_batches=3", "schedule.steps=10", "algo.epochs=2"])
    critic = recipe.algo.critic
    assert critic is not None and (critic.optimizer.lr, critic.optimizer.betas) == (1e-3, (0.9, 0.98)) and critic.clip is None
    assert recipe.algo.gae.lam == 1.0 and recipe.policy_steps == 14, "(10 − 3) batches of two steps"


@pytest.mark.parametrize(
    ("text", "teaches", "trains_rl"),
    [
        ("", None, True),
        ("distill: {teacher: t}\n", "full", True),
        ("distill: {teacher: t}\nalgo: {name: opd}\nschedule: {group_size: 1}\n", "full", False),
        ("distill: {teacher: t, form: policy_gradient}\nalgo: {name: opd}\n", "policy_gradient", True),
        ("distill: {teacher: t}\nalgo: {name: opd, advantage: grpo}\n", "full", True),
        ("distill: {teacher: t}\nalgo: {name: gspo}\n", "full", True),
    ],
)
def test_what_a_distillation_trains(tmp_path: Path, text: str, teaches: str | None, trains_rl: bool) -> None:
    recipe = load_recipe([write(tmp_path, GOOD + text)])
    assert (recipe.teaches, recipe.trains_rl) == (teaches, trains_rl)
