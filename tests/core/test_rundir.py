"""The run directory survives crashes: torn lines, resumed runs, two writers."""

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from slipstream.core.recipe import load_recipe
from slipstream.core.rundir import RunDirectory, read_jsonl, write_atomically
from slipstream.core.schema import Recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: trial\nmodel: {path: 'builtin:tiny'}\ndata: {source: 'builtin:number_sorting'}\n")
    return load_recipe([path])


def test_a_new_run_holds_its_recipe_and_a_second_of_its_name_is_refused(tmp_path: Path, recipe: Recipe) -> None:
    with RunDirectory.create(tmp_path / "runs", recipe) as run:
        assert run.recipe() == recipe
        assert run.checkpoints.is_dir() and run.logs.is_dir()
        with pytest.raises(ValueError, match=r"`slipstream resume .*/runs/trial`.*name=trial-2"):
            RunDirectory.create(tmp_path / "runs", recipe)
    with pytest.raises(ValueError, match=r"no recipe\.yaml"):
        RunDirectory.open(tmp_path / "runs")


def test_records_come_back_and_a_reader_needs_no_lock(tmp_path: Path, recipe: Recipe) -> None:
    with RunDirectory.create(tmp_path, recipe) as run:
        run.append("metrics", {"step": 1, "reward/mean": 0.5})
        run.append("samples", {"batch": 1, "text": "a\nb\u2028c\ud800 ü"})
        reader = RunDirectory.open(tmp_path / "trial")
        assert reader.read("metrics") == ([{"step": 1, "reward/mean": 0.5}], False)
        assert reader.read("samples").records[0]["text"] == "a\nb\u2028c\ud800 ü"
        assert reader.read("events") == ([], False)
        assert run.stream_file("samples").read_bytes().count(b"\n") == 1
        with pytest.raises(AssertionError, match="opened to read"):
            reader.append("events", {})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused_with_their_key(tmp_path: Path, recipe: Recipe, value: float) -> None:
    with RunDirectory.create(tmp_path, recipe) as run:
        with pytest.raises(ValueError, match=r"^loss/parts\.a\[1\]: got -?(nan|inf)"):
            run.append("metrics", {"step": 1, "loss/parts": {"a": [0.0, value]}})
        with pytest.raises(ValueError, match=r"^eval\.after"):
            run.write_summary({"eval": {"after": value}})
        assert run.read("metrics").records == [] and not run.summary_file.exists()


def test_a_torn_last_line_is_reported_and_removed_by_the_next_writer(tmp_path: Path, recipe: Recipe) -> None:
    RunDirectory.create(tmp_path, recipe).close()
    metrics, events = tmp_path / "trial" / "metrics.jsonl", tmp_path / "trial" / "events.jsonl"
    metrics.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    events.write_bytes(b'{"event": "start"}')  # whole, only its newline is missing
    assert read_jsonl(metrics) == ([{"step": 1}], True)
    assert read_jsonl(events) == ([{"event": "start"}], False)
    with RunDirectory.open(tmp_path / "trial", write=True) as run:
        run.append("metrics", {"step": 2})
        run.append("events", {"event": "resume"})
        assert run.read("metrics") == ([{"step": 1}, {"step": 2}], False)
        assert run.read("events").records == [{"event": "start"}, {"event": "resume"}]


def test_damage_anywhere_else_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step":\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: got"):
        read_jsonl(path)
    path.write_bytes(b"[1]\n")
    with pytest.raises(ValueError, match="expected a JSON object"):
        read_jsonl(path)


def test_rewind_forgets_later_batches_and_keeps_events(tmp_path: Path, recipe: Recipe) -> None:
    with RunDirectory.create(tmp_path, recipe) as run:
        for step in range(1, 6):
            run.append("metrics", {"step": step})
            run.append("samples", {"batch": step, "sample_id": "a"})
            run.append("samples", {"batch": step, "sample_id": "b"})
            run.append("events", {"event": "commit", "batch": step})
        assert run.rewind(3) == {"metrics": 2, "samples": 4}
        assert run.rewind(3) == {"metrics": 0, "samples": 0}
        run.append("metrics", {"step": 4, "again": True})
        assert [r["step"] for r in run.read("metrics").records] == [1, 2, 3, 4]
        assert [r["batch"] for r in run.read("samples").records] == [1, 1, 2, 2, 3, 3]
        assert len(run.read("events").records) == 5


def test_rewind_holds_one_record_at_a_time(tmp_path: Path, recipe: Recipe) -> None:
    """Samples of a long run are gigabytes: here 4 MB, of which a megabyte goes."""
    with RunDirectory.create(tmp_path, recipe) as run:
        for batch in range(1, 5):
            for number in range(100):
                run.append("samples", {"batch": batch, "number": number, "text": "ä" * 5_000})
        before = run.stream_file("samples").read_bytes()
        tracemalloc.start()
        dropped = run.rewind(3)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert dropped == {"metrics": 0, "samples": 100}
        assert run.stream_file("samples").read_bytes() == before[: 3 * len(before) // 4]
        assert peak < 400_000, f"{peak} bytes at once"


def test_two_processes_never_write_one_run_and_a_killed_one_leaves_no_lock(tmp_path: Path, recipe: Recipe) -> None:
    RunDirectory.create(tmp_path, recipe).close()
    code = (
        "import sys, time; from pathlib import Path; from slipstream.core.rundir import RunDirectory\n"
        f"run = RunDirectory.open(Path({str(tmp_path / 'trial')!r}), write=True); print('locked', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=f"is being written by process {other.pid}"):
            RunDirectory.open(tmp_path / "trial", write=True)
        assert RunDirectory.open(tmp_path / "trial").read("metrics").records == []
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait(timeout=30)
    RunDirectory.open(tmp_path / "trial", write=True).close()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, b'{"status": "completed"}')

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"{}")
    assert json.loads(path.read_bytes()) == {"status": "completed"}
    assert [item.name for item in tmp_path.iterdir()] == ["summary.json"]


def test_a_line_that_a_full_disk_cut_off_does_not_damage_the_next(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes ten bytes; then somebody makes room, and the run writes how it ended."""
    with RunDirectory.create(tmp_path, recipe) as run:
        run.append("events", {"kind": "start"})
        write = os.write
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
        with pytest.raises(OSError, match=r"only 10 of 18 bytes were written; is the disk full\?"):
            run.append("events", {"kind": "ready"})
        monkeypatch.undo()
        run.append("events", {"kind": "end"})
        assert run.read("events") == ([{"kind": "start"}, {"kind": "end"}], False)
