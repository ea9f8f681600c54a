"""What staleness costs, and what the corrections give back: the quickstart's task at η = 0, 2 and 8.

Every arm starts from the same warm start, takes two optimizer steps per batch and as many batches.  Weights are published only
every η-th step, so that the lag does occur: `token_lag_*` is what was measured.

accuracy_*                        held-out accuracy at the end
steps_to_80_*                     first evaluation (every 5 steps) of at least 0.8; the number of steps + 1 where there is none
trained_tokens_per_s_*            of the training alone
masked_frac_*, ess_*              tokens beyond the bound; effective sample size of π_prox / π_b
decoupled_minus_sync_accuracy_eta8   accuracy of `eta8_decoupled` minus that of `sync`

One run per arm and seed; the order of the arms turns around with every seed.  Draws docs/staleness.svg.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from common import ROOT, Job, arguments, finish, run_job, say, warm_started

RECIPE = str(ROOT / "recipes" / "quickstart.yaml")
STEPS, WARM_STEPS = 60, 850
ENOUGH = 0.8
NONE = "algo.correction={weight: none}"
DECOUPLED = "algo.correction={weight: token, cap: null}"
ARMS = {
    "sync": (0, NONE),
    "eta2_decoupled": (2, DECOUPLED),
    "eta8_none": (8, NONE),
    "eta8_tis": (8, "algo.correction={weight: token, cap: 2.0}"),
    "eta8_decoupled": (8, DECOUPLED),
    "eta8_decoupled_icepop": (8, "algo.correction={weight: token, cap: null, reject: [icepop]}"),
}


def main() -> None:
    options = arguments(__doc__, extend)
    seeds, steps = ([0], 20) if options.quick else ([0, 1, 2], options.steps)
    arms = {arm: ARMS[arm] for arm in options.arms}
    figures: dict[str, list[float]] = defaultdict(list)
    curves: dict[str, list[dict[int, float]]] = defaultdict(list)
    for seed in seeds:
        model = str(warm_started(RECIPE, seed, WARM_STEPS))
        for arm in arms if seed % 2 == 0 else reversed(arms):
            job = run_arm(arm, seed, steps, model)
            record(figures, arm, job, steps)
            curves[arm].append(job.scores())
            say(f"seed {seed}, {arm}: accuracy {figures[f'accuracy_{arm}'][-1]:.3f}, lag {figures[f'token_lag_{arm}'][-1]:.2f}")
        if {"sync", "eta8_decoupled"} <= arms.keys():
            figures["decoupled_minus_sync_accuracy_eta8"].append(
                figures["accuracy_eta8_decoupled"][-1] - figures["accuracy_sync"][-1]
            )
    name = "staleness" if steps == STEPS else f"staleness_{steps}"
    if not options.quick:
        draw(curves, ROOT / "docs" / f"{name}.svg")
    setup = {"recipe": "recipes/quickstart.yaml", "arms": arms, "steps": steps, "warm_steps": WARM_STEPS, "curves": curves}
    finish(name, figures, options.quick, **setup)


def extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of every arm (default {STEPS})")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")


def run_arm(arm: str, seed: int, steps: int, model: str) -> Job:
    bound, correction = ARMS[arm]
    overrides = [
        f"seed={seed}",
        f"model.path={model}",
        "warm_start=null",
        "algo.minibatches=2",
        correction,
        f"schedule.steps={steps}",
        f"schedule.max_staleness={bound}",
        f"schedule.publish_every={max(bound, 1)}",
        "monitor.eval={every: 5, size: 512, concurrency: 256}",
    ]
    return run_job(RECIPE, f"staleness-{arm}-{seed}", overrides)


def record(figures: dict[str, list[float]], arm: str, job: Job, steps: int) -> None:
    reached = [step for step, score in job.scores().items() if score >= ENOUGH]
    summary = job.summary
    figures[f"accuracy_before_{arm}"].append(summary["eval"]["before"])
    figures[f"accuracy_{arm}"].append(summary["eval"]["after"])
    figures[f"steps_to_80_{arm}"].append(reached[0] if reached else steps + 1)
    figures[f"trained_tokens_per_s_{arm}"].append(summary["throughput"]["trained_tokens_per_s"])
    figures[f"token_lag_{arm}"].append(summary["staleness"]["token_mean"])
    figures[f"masked_frac_{arm}"].append(summary["staleness"]["masked_frac"])
    figures[f"ess_{arm}"].append(fmean(line["offpolicy/ess"] for line in job.metrics))


def draw(curves: Mapping[str, Sequence[Mapping[int, float]]], file: Path) -> None:
    """Accuracy over steps: the mean over seeds, and the band between the lowest and the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for arm, of_seeds in curves.items():
        steps = sorted(of_seeds[0])
        columns = [[curve[step] for curve in of_seeds] for step in steps]
        (line,) = axes.plot(steps, [fmean(column) for column in columns], label=arm)
        axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=line.get_color(), alpha=0.12)
    axes.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(file)


if __name__ == "__main__":
    main()
