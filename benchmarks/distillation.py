"""On-policy distillation against GRPO from the same start: steps until 95 % of the teacher's accuracy.

The teacher is the quickstart's policy after its GRPO, of seed 0; the students are the quickstart's warm starts.  All arms write
256 responses a step with the same optimizer.  GRPO needs groups, so it has 32 prompts with 8 responses each; a teacher judges
each response by itself, so distillation has 256 prompts.  `_4` takes four optimizer steps per batch instead of one, for both.

teacher_accuracy        held-out, at temperature 1, like the others
accuracy_before         of the students
accuracy_*              at the end (opd: half as many steps)
steps_to_95_*           first evaluation (every 2 steps) of at least 0.95 · teacher_accuracy; steps + 1 where there is none
steps_ratio             steps_to_95_opd / steps_to_95_grpo, per seed
steps_ratio_4           the same of opd_4 and grpo_4
"""

from __future__ import annotations

from collections import defaultdict

from common import ROOT, WORK, Job, arguments, export, finish, run_job, say, warm_started

RECIPE = str(ROOT / "recipes" / "quickstart.yaml")
EVALUATION = "monitor.eval={every: 2, size: 512, concurrency: 256}"
ENOUGH = 0.95
ONE_EACH = ("schedule.groups_per_step=256", "schedule.group_size=1")
FOUR = "algo.minibatches=4"


def main() -> None:
    quick = arguments(__doc__).quick
    seeds, steps, warm_steps = ([0], 60, 850) if quick else ([0, 1, 2], 60, 850)
    figures: dict[str, list[float]] = defaultdict(list)
    teacher_run = grpo(0, steps, warm_steps)
    teacher = export(teacher_run, WORK / "models" / "teacher")
    aim = ENOUGH * teacher_run.summary["eval"]["after"]
    figures["teacher_accuracy"].append(teacher_run.summary["eval"]["after"])
    taught = ("algo.name=opd", f"distill.teacher={teacher}", *ONE_EACH)
    for seed in seeds:
        arms = {
            "grpo": teacher_run if seed == 0 else grpo(seed, steps, warm_steps),
            "grpo_4": run(seed, steps, warm_steps, "grpo_4", FOUR),
            "opd": run(seed, steps // 2, warm_steps, "opd", *taught),
            "opd_4": run(seed, steps // 2, warm_steps, "opd_4", *taught, FOUR),
        }
        figures["accuracy_before"].append(arms["opd"].summary["eval"]["before"])
        for arm, job in arms.items():
            figures[f"accuracy_{arm}"].append(job.summary["eval"]["after"])
            figures[f"steps_to_95_{arm}"].append(steps_to(aim, job))
        for of in ("", "_4"):
            opd, other = (figures[f"steps_to_95_{arm}{of}"][-1] for arm in ("opd", "grpo"))
            figures[f"steps_ratio{of}"].append(opd / other)
            say(f"seed {seed}{of}: steps to {aim:.3f}: {opd} against {other}")
    finish("distillation", figures, quick, recipe="recipes/quickstart.yaml", steps=steps, warm_steps=warm_steps)


def grpo(seed: int, steps: int, warm_steps: int) -> Job:
    return run(seed, steps, warm_steps, "grpo")


def run(seed: int, steps: int, warm_steps: int, arm: str, *overrides: str) -> Job:
    model = warm_started(RECIPE, seed, warm_steps)
    start = [f"seed={seed}", f"model.path={model}", "warm_start=null", f"schedule.steps={steps}", EVALUATION]
    return run_job(RECIPE, f"distillation-{arm}-{seed}", [*start, *overrides])


def steps_to(aim: float, job: Job) -> float:
    return min((step for step, score in job.scores().items() if step and score >= aim), default=job.metrics[-1]["step"] + 1)


if __name__ == "__main__":
    main()
