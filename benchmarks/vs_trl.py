"""Slipstream against TRL's GRPOTrainer on this machine's CPU: same weights, data, reward, sampling, batch and optimizer steps.

samples_ratio_short        sampled responses per second of training, ours divided by TRL's: the quickstart's short responses
samples_ratio_longtail     the same on responses with a long tail (longtail.yaml)
trained_ratio_*            the same, counting only responses that reach the optimizer with an advantage: we filter groups of
                           equal rewards before training and sample others in their place, TRL trains on them with weight 0
startup_s_*                seconds from the start of the process until the first optimizer step has ended

Both in float32, groups of the same size, one optimizer step per batch.  TRL is one process (generation and training take turns)
without checkpoints or trackers, and a whole batch is one micro-batch; our engine and our learner are two processes with one
thread each.  Rates are of the steady state: from the end of the second step to the end of the last.

TRL lives in .benchvenv/trl, made here if it is missing.  It gets the fastest of transformers' `generate` with one thread, with
two, and continuous batching, found in a few steps of each workload (two threads that share their cores with anything else are
the slowest by far).  Not vLLM: TRL 1.16 drives vLLM 0.22 to 0.31, and moves weights to it over NCCL or CUDA handles.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import HERE, ROOT, WORK, Job, arguments, finish, run_job, say, warm_started

from slipstream.core.recipe import load_recipe

VENV = ROOT / ".benchvenv" / "trl"
PINS = ("torch==2.13.0", "trl==1.16.0", "transformers>=5.19,<5.20", "datasets>=5.2,<5.3")
WARM_UP = 2
"""Steps that do not count."""


@dataclass(frozen=True, slots=True)
class Workload:
    recipe: Path
    steps: int
    warm_steps: int


@dataclass(frozen=True, slots=True)
class Way:
    """How TRL writes its responses, and with how many threads."""

    generation: str
    threads: int

    def __str__(self) -> str:
        return f"{self.generation}, {self.threads} thread{'s' * (self.threads > 1)}"


WAYS = (Way("generate", 1), Way("generate", 2), Way("continuous", 1))


def workloads(quick: bool) -> dict[str, Workload]:
    quickstart, longtail = ROOT / "recipes" / "quickstart.yaml", HERE / "longtail.yaml"
    if quick:
        return {"short": Workload(quickstart, 8, 850), "longtail": Workload(longtail, 6, 900)}
    return {"short": Workload(quickstart, 20, 850), "longtail": Workload(longtail, 14, 900)}


def main() -> None:
    quick = arguments(__doc__).quick
    install_trl()
    figures: dict[str, list[float]] = defaultdict(list)
    ways: dict[str, str] = {}
    for name, workload in workloads(quick).items():
        model = warm_started(str(workload.recipe), 0, workload.warm_steps)
        way = fastest_way(name, workload, model)
        ways[name] = str(way)
        for repetition in range(1 if quick else 3):
            ours = rates_of_job(run_ours(name, workload, model, repetition))
            theirs = rates_of_trl(run_trl(name, workload, model, repetition, way))
            for side, rates in (("ours", ours), ("trl", theirs)):
                for key, value in rates.items():
                    figures[f"{key}_{side}_{name}"].append(value)
            figures[f"samples_ratio_{name}"].append(ours["samples_per_s"] / theirs["samples_per_s"])
            figures[f"trained_ratio_{name}"].append(ours["trained_per_s"] / theirs["trained_per_s"])
            say(f"{name}: " + ", ".join(f"{key} {values[-1]:.2f}" for key, values in figures.items() if key.endswith(name)))
    steps = {name: workload.steps for name, workload in workloads(quick).items()}
    finish("vs_trl", figures, quick, steps=steps, trl=PINS, trl_ways=ways)


def install_trl() -> None:
    """TRL and what it needs in an environment of its own, by uv where there is one, from where pip is told to look."""
    if (VENV / ".complete").exists():
        return
    say("installing TRL into .benchvenv/trl")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    python = str(VENV / "bin" / "python")
    settings = subprocess.run([python, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True).stdout
    links = [line.split("=", 1)[1].strip("'\"") for line in settings.splitlines() if "find-links" in line.split("=")[0]]
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    installer = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    source = ["--find-links", links[0]] if links else ["--torch-backend", "cpu"] if uv else []
    subprocess.run([*installer, "--quiet", *source, *PINS], check=True, stdout=sys.stderr)
    (VENV / ".complete").touch()


# ---- ours


def run_ours(name: str, workload: Workload, model: Path, repetition: int) -> Job:
    overrides = [
        "warm_start=null",
        "monitor.eval.size=0",
        "trainer.max_tokens_per_microbatch=512",
        f"model.path={model}",
        f"schedule.steps={workload.steps}",
        f"seed={repetition}",
    ]
    return run_job(str(workload.recipe), f"vs-trl-{name}-{repetition}", overrides)


def rates_of_job(job: Job) -> dict[str, float]:
    """Samples that left the engine, and samples that were trained, per second between two steps."""
    first, last = job.metrics[WARM_UP - 1], job.metrics[-1]
    seconds = last["time"] - first["time"]
    trained = last["ledger/trained"] - first["ledger/trained"]
    written = ("ready", "training", "trained", "stale", "filtered", "failed")
    sampled = sum(last[f"ledger/{state}"] - first[f"ledger/{state}"] for state in written)
    startup = first["time"] - first["time/step"] - job.events[0]["time"]
    return {"samples_per_s": sampled / seconds, "trained_per_s": trained / seconds, "startup_s": startup}


# ---- TRL's


def fastest_way(name: str, workload: Workload, model: Path) -> Way:
    """The way of TRL's that takes least time for a step, the median of three after the first."""
    short = replace(workload, steps=4)
    seconds = {}
    for way in WAYS:
        ends = run_trl(name, short, model, 0, way)["step_ends"]
        seconds[way] = statistics.median(b - a for a, b in pairwise(ends))
        say(f"{name}: TRL with {way}: {seconds[way]:.1f} s a step")
    return min(WAYS, key=seconds.__getitem__)


def run_trl(name: str, workload: Workload, model: Path, repetition: int, way: Way) -> dict[str, Any]:
    recipe = load_recipe([workload.recipe], [f"seed={repetition}"])
    optimizer, schedule = recipe.trainer.optimizer, recipe.schedule
    work = WORK / f"vs-trl-{name}-trl-{repetition}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    spec = {
        "model": str(model),
        "work": str(work),
        "rows": rows_of(recipe, model),
        "after": recipe.reward.parts[0].options.get("after"),
        "groups_per_step": schedule.groups_per_step,
        "group_size": schedule.group_size,
        "max_tokens": recipe.rollout.sampling.max_tokens,
        "steps": workload.steps,
        "lr": optimizer.lr,
        "betas": optimizer.betas,
        "seed": repetition,
        "threads": way.threads,
        "continuous_batching": way.generation == "continuous",
    }
    (work / "spec.json").write_text(json.dumps(spec))
    environment = {**os.environ, "OMP_NUM_THREADS": str(way.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    say(f"{name}: TRL, {workload.steps} steps, {way}")
    done = subprocess.run(
        [str(VENV / "bin" / "python"), str(HERE / "trl_side.py"), str(work / "spec.json"), str(work / "result.json")],
        env=environment,
        capture_output=True,
        text=True,
    )
    (work / "log").write_text(done.stdout + done.stderr)
    if done.returncode:
        say(f"TRL failed:\n{done.stderr[-3000:]}")
        done.check_returncode()
    return json.loads((work / "result.json").read_text())


def rows_of(recipe: Any, model: Path) -> list[dict[str, str]]:
    """The recipe's tasks as TRL takes them; the tokenizer makes of the text the ids that our policy sees."""
    from slipstream.rollout.prompts import PromptEncoder
    from slipstream.rollout.tasks import open_source
    from slipstream.trainer.model import load_tokenizer

    source = open_source(recipe.data, recipe.seed, "train", recipe.monitor.eval)
    tokenizer = load_tokenizer(model)
    encoder = PromptEncoder(tokenizer)
    tasks = [source.task(0, position) for position in range(min(len(source), 4096))]
    rows = [{"prompt": str(task.prompt), "answer": str(task.answer)} for task in tasks]
    assert all(tuple(tokenizer(row["prompt"]).input_ids) == encoder.encode(task) for row, task in zip(rows, tasks, strict=True))
    return rows


def rates_of_trl(result: dict[str, Any]) -> dict[str, float]:
    """TRL samples exactly what it trains on; a sample of a group with equal rewards has no advantage."""
    ends, batch = result["step_ends"], result["samples_per_step"]
    seconds, steps = ends[-1] - ends[WARM_UP - 1], len(ends) - WARM_UP
    with_signal = sum(1 - share for share in result["no_signal"][WARM_UP:]) * batch
    return {"samples_per_s": steps * batch / seconds, "trained_per_s": with_signal / seconds, "startup_s": ends[0]}


if __name__ == "__main__":
    main()
