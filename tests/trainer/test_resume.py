"""Two batches, save, a fresh process, load, two batches: the same bits as four batches straight."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.core import schema
from slipstream.trainer.checkpoint import LEARNER, CheckpointError, export_model, latest, write_checkpoint
from slipstream.trainer.distributed import free_port

pytestmark = pytest.mark.learner
Case = tuple[str, int, str]
CASES: dict[int, list[Case]] = {
    1: [("zero0", 0, "float32"), ("bf16-zero2", 2, "bfloat16"), ("ppo-zero0", 0, "float32")],
    2: [
        *((f"zero{s}", s, "float32") for s in range(4)),
        ("bf16-zero1", 1, "bfloat16"),
        ("bf16-zero3", 3, "bfloat16"),
        ("ppo-zero3", 3, "float32"),
        ("ppo-bf16-zero2", 2, "bfloat16"),
    ],
}


def launch(modes: str, ranks: int, model: Path, folder: Path, cases: list[Case]) -> None:
    script, port = Path(__file__).with_name("state_worker.py"), free_port()
    workers = []
    for rank in range(ranks):
        arguments = [str(rank), str(ranks), str(port), str(model), str(folder), modes, json.dumps(cases)]
        with (folder / f"{modes}-{rank}.log").open("w") as log:
            workers.append(
                subprocess.Popen(
                    [sys.executable, str(script), *arguments],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        codes = [worker.wait(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0] * ranks, (folder / f"{modes}-0.log").read_text()[-3000:]


def check_bits(ranks: int, folder: Path) -> None:
    for name, _, dtype in CASES[ranks]:
        straight, resumed = (load_file(folder / name / f"{which}.safetensors") for which in ("straight", "resumed"))
        assert straight.keys() == resumed.keys()
        assert [key for key in straight if not torch.equal(straight[key], resumed[key])] == [], name
        for rank in range(ranks):
            before, after = (json.loads((folder / name / f"draws-{w}{rank}.json").read_text()) for w in ("", "resumed-"))
            assert before == after, "the random streams continue too"
        suffixes = {path.suffix for path in (folder / name / "saved").rglob("*") if path.is_file()}
        assert suffixes <= {".safetensors", ".json", ".jinja"}, "data only: nothing that has to be unpickled"
        optimizers = sorted((folder / name / "saved").glob("*optimizer-*.safetensors"))
        assert len(optimizers) == (2 if name.startswith("ppo") else 1)
        for file in optimizers:
            keys = {key.split("/")[0] for key in load_file(file)}
            assert keys == {"exp_avg", "exp_avg_sq"} | ({"master"} if dtype == "bfloat16" else set())


def test_a_new_learner_continues_bit_for_bit(tiny: Path, tmp_path: Path) -> None:
    launch("save,resume", 1, tiny, tmp_path, CASES[1])
    check_bits(1, tmp_path)


def test_fresh_processes_continue_bit_for_bit_and_another_layout_to_rounding(tiny: Path, tmp_path: Path) -> None:
    launch("save", 2, tiny, tmp_path, CASES[2])
    launch("resume", 2, tiny, tmp_path, CASES[2])
    check_bits(2, tmp_path)
    # Saved by two ranks at ZeRO-3, continued by one at ZeRO-0.
    moved: list[Case] = [("zero3", 0, "float32"), ("ppo-zero3", 0, "float32")]
    launch("resume", 1, tiny, tmp_path, moved)
    for name, *_ in moved:
        straight, resumed = (load_file(tmp_path / name / f"{which}.safetensors") for which in ("straight", "resumed"))
        for key, expected in straight.items():
            assert (resumed[key] - expected).norm() < 1e-4 * expected.norm(), key


@pytest.mark.usefixtures("alone")
def test_saved_state_is_checked_and_exported(recipe: Callable[..., schema.Recipe], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from slipstream.trainer.learner import Learner

    built = recipe(name="x")
    learner = Learner(built, Path(built.model.path), 0, 1)
    learner.begin_phase(schema.Optimizer(), 1)
    with write_checkpoint(tmp_path / "checkpoints", step=1, keep=1) as draft:
        learner.save(draft / LEARNER)
    checkpoint, _ = latest(tmp_path / "checkpoints")
    assert checkpoint is not None
    export_model(checkpoint, tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert all(torch.equal(a, b) for a, b in zip(exported.parameters(), learner.policy.parameters(), strict=True))
    assert exported.generation_config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").encode("12<") == [1, 5, 6, 47]

    broken = tmp_path / "broken"
    shutil.copytree(checkpoint / LEARNER, broken)
    (broken / "optimizer-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensor 'exp_avg/model\.embed_tokens\.weight' is missing"):
        learner.load(broken)
    (broken / "learner.json").unlink()
    with pytest.raises(CheckpointError, match=r"no readable learner\.json"):
        learner.load(broken)


@pytest.mark.usefixtures("alone")
def test_a_full_disk_during_save(recipe: Callable[..., schema.Recipe], tmp_path: Path) -> None:
    """The kernel refuses to write on (a limit on file sizes; a full disk behaves alike), amid the optimizer's state."""
    from slipstream.trainer.learner import Learner

    built = recipe(name="x")
    learner = Learner(built, Path(built.model.path), 0, 1)
    learner.begin_phase(schema.Optimizer(), 1)
    root = tmp_path / "checkpoints"
    with write_checkpoint(root, step=1, keep=1) as draft:
        (draft / "small").write_text("old")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught, write_checkpoint(root, step=2, keep=1) as draft:
            learner.save(draft / LEARNER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert caught.value.errno == errno.EFBIG
    assert latest(root) == (root / "step-00000001", [])
    assert sorted(path.name for path in root.iterdir()) == ["LATEST", "step-00000001"]
