"""Does every algorithm learn?  Each preset of `algo.name` on the quickstart's task, from one shared warm start.

Same model, data, sampling, optimizer and number of steps for all, asynchronous with a bound of 2: what a preset sets is all
that differs.  One seed: the figures say that an algorithm works, not which one is better.

accuracy_before_*   held-out accuracy of the warm start, sampled anew in every run
accuracy_*          held-out accuracy at the end
gain_*              the difference
least_gain          the smallest of the gains
trained_*, filtered_*   samples that were trained, and those that dynamic sampling left out
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from common import ROOT, Job, arguments, finish, run_job, say, warm_started

from slipstream.core.algorithms import PRESETS

RECIPE = str(ROOT / "recipes" / "quickstart.yaml")
SEED, WARM_STEPS = 0, 850
VARIANTS = [name for name in PRESETS if name not in ("sft", "opd")]
"""All that learn from rewards: `sft` has none, `opd` a teacher."""
QUICK = ("grpo", "reinforce", "gspo")


def main() -> None:
    options = arguments(__doc__, extend)
    steps, variants = (20, QUICK) if options.quick else (60, options.presets)
    model = str(warm_started(RECIPE, SEED, WARM_STEPS))
    figures: dict[str, list[float]] = defaultdict(list)
    for variant in variants:
        record(figures, variant, run_variant(variant, steps, model))
        say(f"{variant}: accuracy {figures[f'accuracy_before_{variant}'][-1]:.3f} → {figures[f'accuracy_{variant}'][-1]:.3f}")
    figures["least_gain"].append(min(figures[f"gain_{variant}"][-1] for variant in variants))
    presets = {variant: PRESETS[variant] for variant in variants}
    setup = {"recipe": "recipes/quickstart.yaml", "presets": presets, "seed": SEED, "steps": steps, "warm_steps": WARM_STEPS}
    name = "algorithms" if options.presets == VARIANTS else "_".join(["algorithms", *variants])
    finish(name, figures, options.quick, **setup)


def extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--presets", nargs="+", choices=VARIANTS, default=VARIANTS, help="default: all")


def run_variant(variant: str, steps: int, model: str) -> Job:
    overrides = [
        f"seed={SEED}",
        f"model.path={model}",
        "warm_start=null",
        f"algo.name={variant}",
        f"schedule.steps={steps}",
        "monitor.eval={every: null, size: 512, concurrency: 256}",
    ]
    return run_job(RECIPE, f"algorithms-{variant}", overrides)


def record(figures: dict[str, list[float]], variant: str, job: Job) -> None:
    before, after = job.summary["eval"]["before"], job.summary["eval"]["after"]
    figures[f"accuracy_before_{variant}"].append(before)
    figures[f"accuracy_{variant}"].append(after)
    figures[f"gain_{variant}"].append(after - before)
    figures[f"trained_{variant}"].append(job.summary["ledger"]["trained"])
    figures[f"filtered_{variant}"].append(job.summary["ledger"]["filtered"])


if __name__ == "__main__":
    main()
