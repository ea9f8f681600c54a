"""GRPO on the quickstart's task with and without a draft that learns while it serves, from the same warm starts.

Speculation is exact, so both are to end at the same accuracy.  The draft, one layer of 64, is made by `slipstream draft
train` from the warm start of seed 0 and serves all seeds.

accuracy_before_*, accuracy_*      held-out, at temperature 1
tts_minus_plain_accuracy           at the end
acceptance_length_first, _last     tokens per verified draft in the first and in the last ten steps
acceptance_at_rest                 of the draft before it had learnt from the policy as it was then (the baseline, at the end)
draft_updates, draft_kills, cost_share, draft_lag_max
audited                            1 where `slipstream audit` found bound and ledger of the run in order
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from common import ROOT, WORK, Job, arguments, finish, run_job, say, slipstream, warm_started

from slipstream.core.audit import audit

RECIPE = str(ROOT / "recipes" / "quickstart.yaml")
TOKENS = 3
TTS = "tts: {enabled: true, lr: 1.0e-3}"
ENDS = 10


def main() -> None:
    quick = arguments(__doc__).quick
    seeds, steps, warm_steps = ([0], 30, 850) if quick else ([0, 1, 2], 60, 850)
    figures: dict[str, list[float]] = defaultdict(list)
    draft = made_draft(warm_started(RECIPE, 0, warm_steps))
    speculation = f"rollout.speculation={{method: draft_model, draft: {draft}, tokens: {TOKENS}, {TTS}}}"
    for seed in seeds:
        model = warm_started(RECIPE, seed, warm_steps)
        start = [f"seed={seed}", f"model.path={model}", "warm_start=null", f"schedule.steps={steps}"]
        start.append("monitor.eval={every: null, size: 512, concurrency: 256}")
        for arm, overrides in {"plain": [], "tts": [speculation]}.items():
            record(figures, arm, run_job(RECIPE, f"speculative-{arm}-{seed}", [*start, *overrides]))
        figures["tts_minus_plain_accuracy"].append(figures["accuracy_tts"][-1] - figures["accuracy_plain"][-1])
        say(f"seed {seed}: {figures['accuracy_plain'][-1]:.3f} without, {figures['accuracy_tts'][-1]:.3f} with")
    finish("speculative_rl", figures, quick, recipe="recipes/quickstart.yaml", tokens=TOKENS, tts=TTS, steps=steps)


def made_draft(policy: Path) -> Path:
    draft = WORK / "models" / "quickstart-draft"
    shutil.rmtree(draft, ignore_errors=True)
    training = "training: {samples: 256, max_tokens: 10, steps: 200, batch_size: 32, lr: 2.0e-3}"
    keys = f"{{method: draft_model, draft: {draft}, tokens: {TOKENS}, {training}}}"
    slipstream("draft", "train", RECIPE, f"model.path={policy}", "warm_start=null", f"rollout.speculation={keys}", "--quiet")
    return draft


def record(figures: dict[str, list[float]], arm: str, job: Job) -> None:
    figures[f"accuracy_before_{arm}"].append(job.summary["eval"]["before"])
    figures[f"accuracy_{arm}"].append(job.summary["eval"]["after"])
    figures[f"trained_tokens_per_s_{arm}"].append(job.summary["throughput"]["trained_tokens_per_s"])
    figures["audited"].append(audit(job.path).ok)
    if arm == "tts":
        lengths = [line["draft/acceptance_length"] for line in job.metrics]
        figures["acceptance_length_first"].append(fmean(lengths[:ENDS]))
        figures["acceptance_length_last"].append(fmean(lengths[-ENDS:]))
        figures["acceptance_at_rest"].append(job.metrics[-1]["draft/baseline"])
        figures["draft_updates"].append(job.summary["draft"]["updates"])
        figures["draft_kills"].append(job.summary["draft"]["kills"])
        figures["draft_lag_max"].append(max(line["draft/lag"] for line in job.metrics))
        figures["cost_share"].append(fmean(line["draft/cost_share"] for line in job.metrics))


if __name__ == "__main__":
    main()
