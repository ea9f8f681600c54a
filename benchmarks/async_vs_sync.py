"""Asynchronous (max_staleness 2) against synchronous (0): the same code, weights, data and number of samples.

The workload has responses with a long tail (longtail.yaml), rewarded by the share of right digits, so that the long ones, which
are seldom right throughout, are trained on as well.  In the synchronous arm the engine waits while the learner trains, and the
learner waits until the longest response is written.

trained_tokens_ratio   trained tokens/s of the asynchronous arm divided by the synchronous one's, of the training alone
reward_difference      final held-out reward, asynchronous minus synchronous
idle_*                 share of the training in which the engine held no request, or the learner waited for groups

One pair of runs per seed, from one warm start; which arm goes first alternates.
"""

from __future__ import annotations

from collections import defaultdict

from common import HERE, Job, arguments, finish, run_job, say, warm_started

RECIPE = str(HERE / "longtail.yaml")
REWARD = "reward.parts=[{function: 'benchmark_rewards:digits_in_place'}]"
ARMS = {"async": 2, "sync": 0}


def main() -> None:
    quick = arguments(__doc__).quick
    seeds, steps, warm_steps = ([0], 12, 500) if quick else ([0, 1, 2], 20, 900)
    figures: dict[str, list[float]] = defaultdict(list)
    for seed in seeds:
        model = warm_started(RECIPE, seed, warm_steps)
        order = list(ARMS) if seed % 2 == 0 else list(reversed(ARMS))
        jobs = {arm: arm_job(arm, seed, steps, str(model)) for arm in order}
        for arm, job in jobs.items():
            record(figures, arm, job)
        rates = {arm: job.summary["throughput"]["trained_tokens_per_s"] for arm, job in jobs.items()}
        figures["trained_tokens_ratio"].append(rates["async"] / rates["sync"])
        figures["reward_difference"].append(figures["reward_async"][-1] - figures["reward_sync"][-1])
        say(f"seed {seed}: " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in sorted(figures.items())))
    setup = {"recipe": "benchmarks/longtail.yaml", "steps": steps, "warm_steps": warm_steps}
    finish("async_vs_sync", figures, quick, **setup, lengths=response_lengths(jobs["sync"]))


def arm_job(arm: str, seed: int, steps: int, model: str) -> Job:
    overrides = [
        REWARD,
        f"seed={seed}",
        f"model.path={model}",
        f"schedule.max_staleness={ARMS[arm]}",
        f"schedule.steps={steps}",
    ]
    return run_job(RECIPE, f"async-vs-sync-{arm}-{seed}", overrides)


def record(figures: dict[str, list[float]], arm: str, job: Job) -> None:
    summary = job.summary
    figures[f"trained_tokens_per_s_{arm}"].append(summary["throughput"]["trained_tokens_per_s"])
    figures[f"reward_before_{arm}"].append(summary["eval"]["before"])
    figures[f"reward_{arm}"].append(summary["eval"]["after"])
    figures[f"trained_samples_{arm}"].append(summary["ledger"]["trained"])
    figures[f"token_lag_{arm}"].append(summary["staleness"]["token_mean"])
    for part, share in summary["idle"].items():
        figures[f"idle_{part}_{arm}"].append(share)


def response_lengths(job: Job) -> dict[str, int]:
    """Quantiles of the trained responses in tokens: the tail that the workload is about."""
    import json

    lengths = sorted(len(json.loads(line)["token_ids"]) for line in (job.path / "samples.jsonl").open())
    return {f"p{q}": lengths[min(len(lengths) * q // 100, len(lengths) - 1)] for q in (50, 90, 99, 100)}


if __name__ == "__main__":
    main()
