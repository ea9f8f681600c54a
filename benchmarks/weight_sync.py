"""How long new weights keep the engine from generating, in running jobs: the tiny model, and SmolLM2 with 135M parameters.

pause_s_*               generation pause per update: no token is sampled
publish_s_*, bytes_*    from the learner's first bucket to the engine's confirmation, and what travelled
staged_tokens_*         tokens of the responses that were completed while buckets were being staged, per update
in_flight_tokens_*      tokens that the pauses interrupted: of responses that carry more than one version, per update
pause_share_of_step_*   pause divided by the time of the step that it belongs to
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict

from common import HERE, Job, arguments, finish, run_job, warm_started

SKIPPED = 2
"""The first updates meet an engine that is still filling up."""


def main() -> None:
    quick = arguments(__doc__).quick
    steps, warm_steps, big_steps = (10, 500, 4) if quick else (30, 900, 6)
    longtail = str(HERE / "longtail.yaml")
    model = warm_started(longtail, 0, warm_steps)
    common = ["monitor.eval.size=0"]
    tiny = run_job(longtail, "weight-sync-tiny", [f"model.path={model}", f"schedule.steps={steps}", *common])
    big = run_job(str(HERE / "smollm2.yaml"), "weight-sync-smollm2", [f"schedule.steps={big_steps}", *common])
    jobs = {"tiny": tiny, "smollm2": big}
    figures = {f"{name}_{label}": values for label, job in jobs.items() for name, values in figures_of(job).items()}
    recipes = ["benchmarks/longtail.yaml", "benchmarks/smollm2.yaml"]
    finish("weight_sync", figures, quick, recipes=recipes, steps={"tiny": steps, "smollm2": big_steps}, warm_steps=warm_steps)


def figures_of(job: Job) -> dict[str, list[float]]:
    """One number per update; version n is published while the learner waits for, or trains, batch n + 1."""
    updates = {int(e["version"].split(".")[1]): e for e in job.events if e["kind"] == "confirmed"}
    step_s = {line["step"]: line["time/step"] for line in job.metrics}
    interrupted = interrupted_tokens(job)
    figures: dict[str, list[float]] = defaultdict(list)
    for version in sorted(updates)[SKIPPED:]:
        if version + 1 not in step_s:
            continue  # the last version: no step follows it
        update = updates[version]
        for name in ("pause_s", "publish_s", "bytes", "staged_tokens"):
            figures[name].append(update[name])
        figures["in_flight_tokens"].append(interrupted[version])
        figures["step_s"].append(step_s[version + 1])
        figures["pause_share_of_step"].append(update["pause_s"] / step_s[version + 1])
    return figures


def interrupted_tokens(job: Job) -> Counter[int]:
    """By version: tokens, already written when it came, of trained responses that went on under it."""
    tokens: Counter[int] = Counter()
    for line in (job.path / "samples.jsonl").open():
        for version, start, _ in json.loads(line)["versions"][1:]:
            tokens[int(version.split(".")[1])] += start
    return tokens


if __name__ == "__main__":
    main()
