"""On-policy distillation against GRPO from the same start: steps until 95 % of the teacher's accuracy.

The teacher is the quickstart's policy after its GRPO, of seed 0; the students are the quickstart's warm starts.  Rollouts,
batches and optimizer are the same; one side is told how well each response did, the other what the teacher would have written.

teacher_accuracy        held-out, at temperature 1, like the others
accuracy_before         of the students
accuracy_*              at the end (opd: half as many steps)
steps_to_95_*           first evaluation (every 2 steps) of at least 0.95 · teacher_accuracy; steps + 1 where there is none
steps_ratio             steps_to_95_opd / steps_to_95_grpo, per seed
"""

from __future__ import annotations

from collections import defaultdict

from common import ROOT, WORK, Job, arguments, export, finish, run_job, say, warm_started

RECIPE = str(ROOT / "recipes" / "quickstart.yaml")
EVALUATION = "monitor.eval={every: 2, size: 512, concurrency: 256}"
ENOUGH = 0.95


def main() -> None:
    quick = arguments(__doc__).quick
    seeds, steps, warm_steps = ([0], 60, 850) if quick else ([0, 1, 2], 60, 850)
    figures: dict[str, list[float]] = defaultdict(list)
    teacher_run = grpo(0, steps, warm_steps)
    teacher = export(teacher_run, WORK / "models" / "teacher")
    aim = ENOUGH * teacher_run.summary["eval"]["after"]
    figures["teacher_accuracy"].append(teacher_run.summary["eval"]["after"])
    for seed in seeds:
        arms = {
            "grpo": teacher_run if seed == 0 else grpo(seed, steps, warm_steps),
            "opd": run(seed, steps // 2, warm_steps, "opd", "algo.name=opd", f"distill.teacher={teacher}"),
        }
        figures["accuracy_before"].append(arms["opd"].summary["eval"]["before"])
        for arm, job in arms.items():
            figures[f"accuracy_{arm}"].append(job.summary["eval"]["after"])
            figures[f"steps_to_95_{arm}"].append(steps_to(aim, job))
        figures["steps_ratio"].append(figures["steps_to_95_opd"][-1] / figures["steps_to_95_grpo"][-1])
        say(f"seed {seed}: steps to {aim:.3f}: {figures['steps_to_95_opd'][-1]} against {figures['steps_to_95_grpo'][-1]}")
    finish("distillation", figures, quick, recipe="recipes/quickstart.yaml", steps=steps, warm_steps=warm_steps)


def grpo(seed: int, steps: int, warm_steps: int) -> Job:
    return run(seed, steps, warm_steps, "grpo")


def run(seed: int, steps: int, warm_steps: int, arm: str, *overrides: str) -> Job:
    model = warm_started(RECIPE, seed, warm_steps)
    start = [f"seed={seed}", f"model.path={model}", "warm_start=null", f"schedule.steps={steps}", EVALUATION]
    return run_job(RECIPE, f"distillation-{arm}-{seed}", [*start, *overrides])


def steps_to(aim: float, job: Job) -> float:
    scores = {event["step"]: event["score"] for event in job.events if event["kind"] == "eval" and event["step"]}
    return min((step for step, score in scores.items() if score >= aim), default=job.metrics[-1]["step"] + 1)


if __name__ == "__main__":
    main()
