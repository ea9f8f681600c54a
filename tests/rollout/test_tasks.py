"""Task sources: order, disjoint splits, what the built-in task looks like, and every kind of bad file."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.schema import Data, Evaluation
from slipstream.rollout.generated import demonstration, number_sorting, sort
from slipstream.rollout.rows import is_held_out
from slipstream.rollout.tasks import open_source


def jsonl(folder: Path, rows: list[Any], name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def file_source(source: str, **data: Any):
    return open_source(Data(source=source, shuffle=False, **data), 0, "train")


def bad(source: str, **data: Any) -> str:
    with pytest.raises(ValueError) as caught:
        file_source(source, **data)
    return str(caught.value)


def test_the_order_is_a_function_of_seed_epoch_and_position(tmp_path: Path) -> None:
    source = jsonl(tmp_path, [{"prompt": f"p{i}", "answer": i} for i in range(50)])

    def order(seed: int, epoch: int, shuffle: bool = True) -> list[str]:
        tasks = open_source(Data(source=source, shuffle=shuffle), seed, "train")
        assert len(tasks) == 50
        return [str(tasks.task(epoch, position).prompt) for position in range(50)]

    assert order(0, 0) == order(0, 0)
    assert sorted(order(0, 0)) == sorted(order(0, 1)) == sorted(order(0, 0, shuffle=False))
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert order(3, 7, shuffle=False) == [f"p{i}" for i in range(50)]

    tasks = open_source(Data(source=source), 0, "train")
    backwards = [tasks.task(epoch, 49 - i).prompt for i in range(50) for epoch in (2, 1, 0)]  # any order of asking
    assert [prompt for prompt in backwards[2::3]] == order(0, 0)[::-1]
    task = tasks.task(2, 4)
    assert (task.id, task.epoch, task.position) == ("train/2/4", 2, 4)
    with pytest.raises(IndexError):
        tasks.task(0, 50)


def test_number_sorting_is_fast_distinct_and_right() -> None:
    number_sorting({"size": 1}, 0, "train")  # imports reasoning-gym
    start = time.process_time()
    rows = number_sorting({"size": 20_000}, 0, "train")
    assert time.process_time() - start < 5
    assert len({row.prompt for row in rows}) == 20_000
    for row in rows[:500]:
        digits, direction = str(row.prompt)[:-1], str(row.prompt)[-1]
        assert 3 <= len(digits) <= 6 and digits.isdigit()
        assert row.answer == "".join(sorted(digits, reverse={"<": False, ">": True}[direction]))
    right = sum(row.completion == row.answer for row in rows) / len(rows)
    assert right == pytest.approx(0.5, abs=0.015)  # four standard deviations of 20000 coin tosses
    lengths = [len(row.completion or "") - len(row.answer or "") for row in rows if row.completion != row.answer]
    assert set(lengths) == {0, -1}  # the wrong way round, or one number short
    assert sum(lengths) / len(lengths) == pytest.approx(-0.3, abs=0.03)


def test_train_and_eval_never_share_a_prompt_whatever_seed_and_size() -> None:
    train = {row.prompt for seed in (0, 1) for row in number_sorting({"size": 5000, "min_numbers": 2}, seed, "train")}
    evaluation = {row.prompt for seed in (0, 1, 7) for row in number_sorting({"size": 300, "min_numbers": 2}, seed, "eval")}
    assert not train & evaluation and all(is_held_out(str(prompt)) for prompt in evaluation)
    by_seed = [[row.prompt for row in number_sorting({"size": 50}, seed, "train")] for seed in (0, 1)]
    assert len(set(by_seed[0]) & set(by_seed[1])) < 10  # not the same stream moved by one


def test_the_long_variant_writes_out_selection_sort() -> None:
    assert demonstration("2139", ">", long=True) == "9:213;3:21;2:1;1:;=9321"
    assert demonstration("3593", "<", long=True) == "3:593;3:59;5:9;9:;=3359"
    rows = number_sorting({"size": 4000, "long": True, "demonstrations": "clean"}, 0, "train")
    lengths = [len(str(row.prompt)) - 1 for row in rows]
    shares = [sum(low <= n <= high for n in lengths) / 4000 for low, high in ((2, 4), (5, 8), (9, 16))]
    assert shares == pytest.approx([0.62, 0.26, 0.12], abs=0.03)
    assert all(str(row.completion).rpartition("=")[2] == row.answer for row in rows)
    mixed = number_sorting({"size": 2000, "long": True}, 0, "train")
    assert sum(str(row.completion).rpartition("=")[2] == row.answer for row in mixed) / 2000 == pytest.approx(0.5, abs=0.05)
    assert sort("0123", ">") == "3210"


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("builtin:number_sorting", {"sise": 5}, "data.options.sise: unknown key; did you mean `size`?"),
        ("builtin:number_sorting", {"size": 0}, "data.options.size: got 0, expected a number greater than 0"),
        ("builtin:number_sorting", {"min_numbers": 7}, "data.options.min_numbers: got 7, expected at most max_numbers = 6"),
        (
            "builtin:number_sorting",
            {"size": 5000, "min_numbers": 3, "max_numbers": 3},
            "data.options.size: got 5000, but after 1",
        ),
        ("builtin:sorting", {}, "data.source: got builtin:sorting, expected one of builtin:number_sorting"),
        ("reasoning_gym:number_sortin", {}, "did you mean number_sorting"),
        ("reasoning_gym:chain_sum", {"min_term": 2}, "chain_sum has no option min_term; did you mean `min_terms`?"),
        ("reasoning_gym:chain_sum", {"min_terms": 9, "max_terms": 2}, "data.options: reasoning-gym refuses them for chain_sum"),
        ("reasoning_gym:chain_sum", {"size": "9"}, "data.options: got size '9'"),
        ("nowhere.jsonl", {}, "data.source: nowhere.jsonl does not exist"),
    ],
)
def test_bad_sources_and_options(source: str, options: dict[str, Any], message: str) -> None:
    assert message in bad(source, options=options)


def test_reasoning_gym_keeps_the_entry_for_its_scorer_and_splits_by_question() -> None:
    data = Data(source="reasoning_gym:chain_sum", options={"size": 300, "min_terms": 2, "max_terms": 2, "max_digits": 2})
    train, held = open_source(data, 0, "train"), open_source(data, 0, "eval", Evaluation(size=40))
    assert (len(train), len(held)) == (300, 40)
    questions = [{str(source.task(0, i).prompt) for i in range(len(source))} for source in (train, held)]
    assert not questions[0] & questions[1] and len(questions[1]) > 30
    task = train.task(0, 5)
    assert task.columns["dataset"] == "chain_sum" and task.columns["entry"]["question"] == task.prompt
    assert task == open_source(data, 0, "train").task(0, 5)
    chat = open_source(data.model_copy(update={"options": {"size": 3, "chat": True}}), 0, "train").task(0, 0)
    assert chat.prompt[0]["role"] == "user"  # type: ignore[index]


def test_columns_of_trl_and_verl(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": "1+1", "answer": 2, "level": 3},
        {"prompt": chat, "completion": [{"role": "assistant", "content": "ho"}], "answer": "x"},
        {"messages": [*chat, {"role": "assistant", "content": "ho"}]},
        {"messages": chat},
        {"prompt": [1, 5, 9], "completion": "ho"},
        {
            "data_source": "gsm8k",
            "prompt": chat,
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"index": 0},
        },
    ]
    source = file_source(jsonl(tmp_path, rows))
    tasks = [source.task(0, position) for position in range(len(source))]
    assert [task.answer for task in tasks] == ["2", "x", None, None, None, "72"]
    assert [task.completion for task in tasks] == [None, "ho", "ho", None, "ho", None]
    assert [task.prompt for task in tasks] == ["1+1", tuple(chat), tuple(chat), tuple(chat), (1, 5, 9), tuple(chat)]
    assert tasks[0].columns == {"answer": 2, "level": 3}
    assert tasks[5].columns["extra_info"] == {"index": 0}
    other = file_source(jsonl(tmp_path, [{"prompt": "a", "solution": "b"}]), answer_column="solution")
    assert other.task(0, 0).answer == "b"


def test_parquet_and_saved_folders_hold_the_same_tasks(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": str(i)} for i in range(3)]
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(str(tmp_path / "data.parquet"))
    data.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": data, "test": data.select([2])}).save_to_disk(str(tmp_path / "parts"))
    expected = [(({"role": "user", "content": f"q{i}"},), str(i)) for i in range(3)]
    for name, options in (("data.parquet", {}), ("plain", {}), ("parts", {}), ("parts", {"split": "test"})):
        source = file_source(str(tmp_path / name), options=options)
        tasks = [source.task(0, i) for i in range(len(source))]
        assert [(task.prompt, task.answer) for task in tasks] == (expected[2:] if options else expected)
    assert "got 'dev', expected one of train, test" in bad(str(tmp_path / "parts"), options={"split": "dev"})
    (tmp_path / "empty").mkdir()
    assert "no folder written by datasets" in bad(str(tmp_path / "empty"))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    assert "no readable parquet file" in bad(str(tmp_path / "torn.parquet"))


def test_all_bad_rows_are_named_with_their_lines(tmp_path: Path) -> None:
    rows = [
        {"prompt": "fine"},
        '{"prompt": "torn',
        "[1]",
        {"question": "a", "answer": "b"},
        {"prompt": ""},
        {"prompt": [{"role": "user"}]},
        {"prompt": [{"role": "user", "content": "a", "tool_calls": [1]}]},
        {"prompt": "a", "completion": 3},
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"prompt": "a", "answer": ["b"]},
        {"prompt": "a", "reward_model": {"ground_truth": {"x": 1}}},
    ]
    source = jsonl(tmp_path, rows)
    lines = bad(source).splitlines()[1:]
    assert [line.strip().split(": ")[0] for line in lines] == [f"{source}:{n}" for n in range(2, 12)]
    expected = (
        "not JSON | expected an object | there are answer, question | got nothing | content | tool_calls is not supported | "
        "`completion`: got int | the assistant's turn only | `answer`: got list | `reward_model.ground_truth`: got dict"
    )
    for line, what in zip(lines, expected.split(" | "), strict=True):
        assert what in line
    many = bad(jsonl(tmp_path, ["x"] * 30)).splitlines()
    assert len(many) == 22 and "the first twenty are shown" in many[-1]


def test_empty_and_unknown_files(tmp_path: Path) -> None:
    assert "has no rows" in bad(jsonl(tmp_path, [""]))
    assert "no column `solution` (data.answer_column); there are answer, prompt" in bad(
        jsonl(tmp_path, [{"prompt": "a", "answer": "b"}]), answer_column="solution"
    )
    assert "expected .jsonl, .parquet" in bad(jsonl(tmp_path, [{}], "data.csv"))
    assert "data.options.sprit: unknown key; did you mean `split`?" in bad(jsonl(tmp_path, [{}]), options={"sprit": "x"})


def test_a_file_holds_out_its_last_rows_and_their_copies(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": i} for i in range(8)] + [{"prompt": "p1", "answer": 1}]
    data = Data(source=jsonl(tmp_path, rows), shuffle=False)
    evaluation = Evaluation(size=3)
    train, held = open_source(data, 0, "train", evaluation), open_source(data, 0, "eval", evaluation)
    assert [held.task(0, i).prompt for i in range(len(held))] == ["p6", "p7", "p1"]
    assert [train.task(0, i).prompt for i in range(len(train))] == ["p0", "p2", "p3", "p4", "p5"]
    assert held.task(0, 0).id == "eval/0/0"

    other = Evaluation(size=2, source=jsonl(tmp_path, [{"prompt": f"e{i}"} for i in range(5)], "eval.jsonl"))
    assert len(open_source(data, 0, "train", other)) == 9
    assert [open_source(data, 0, "eval", other).task(0, i).prompt for i in (0, 1)] == ["e0", "e1"]
    assert len(open_source(data, 0, "train", Evaluation(size=0))) == 9
    with pytest.raises(ValueError, match="nothing would be left to train on"):
        open_source(data, 0, "train", Evaluation(size=9))
    with pytest.raises(ValueError, match="got 0, expected the number of tasks"):
        open_source(data, 0, "eval", Evaluation(size=0))


def test_evaluation_of_the_built_in_task_takes_its_options_and_its_own_size() -> None:
    data = Data(source="builtin:number_sorting", options={"size": 100, "max_numbers": 4})
    held = open_source(data, 0, "eval", Evaluation(size=20, options={"min_numbers": 4}))
    assert len(held) == 20 and all(len(str(held.task(0, i).prompt)) == 5 for i in range(20))
