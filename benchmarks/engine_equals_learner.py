"""Log-probs of the engine against the learner's weights, in running jobs, for the tiny model and SmolLM2 (tied embeddings).

Each job keeps a checkpoint per step.  Every version-pure trained response is scored by a transformers forward of the checkpoint
of its version; `max_difference_*` is the largest |difference| over all their tokens, `newest_*` the newest of these versions,
which is how many updates the engine had taken.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from common import HERE, Job, arguments, finish, prepare_environment, run_job, say

MIN_TOKENS = 5_000
KEEP_ALL = ["checkpoint={every: 1, keep: 99}", "monitor.eval.size=0"]
TINY = ["schedule.steps=6", "rollout.sampling.max_tokens=32", "model.max_length=128", "warm_start.steps=20"]
SMOLLM2 = [
    "schedule.steps=8",
    "schedule.max_staleness=1",
    "schedule.group_size=8",
    "rollout.max_num_seqs=32",
    "trainer.optimizer.lr=1.0e-4",
]
JOBS = {"tiny": (HERE.parent / "recipes" / "quickstart.yaml", TINY), "smollm2": (HERE / "smollm2.yaml", SMOLLM2)}


def main() -> None:
    options = arguments(__doc__)
    prepare_environment()
    figures: dict[str, list[float]] = {}
    for model in ("tiny",) if options.quick else JOBS:
        recipe, overrides = JOBS[model]
        for temperature in (1.0, 0.7):
            sampling = f"rollout.sampling.temperature={temperature}"
            job = run_job(
                str(recipe), f"agreement-{model}-{temperature}", [*overrides, *KEEP_ALL, sampling, "algo.name=reinforce"]
            )
            worst, tokens, newest = agreement(job, temperature)
            say(f"{model} at T = {temperature}: {worst:.2e} over {tokens} tokens of versions up to {newest}")
            tag = f"{model}_t{temperature}"
            figures |= {f"max_difference_{tag}": [worst], f"tokens_{tag}": [tokens], f"newest_{tag}": [newest]}
    finish("engine_equals_learner", figures, options.quick, enough_tokens=MIN_TOKENS)


def agreement(job: Job, temperature: float) -> tuple[float, int, int]:
    """(largest difference, tokens compared, newest version compared) over the version-pure responses."""
    import torch
    from transformers import AutoModelForCausalLM

    by_version: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in (job.path / "samples.jsonl").open():
        sample = json.loads(line)
        if len(sample["versions"]) == 1:
            by_version[int(sample["versions"][0][0].split(".")[1])].append(sample)
    worst, tokens, newest = 0.0, 0, 0
    for version, samples in sorted(by_version.items()):
        folder = job.path / "checkpoints" / f"step-{version:08d}" / "learner" / "model"
        if not folder.is_dir():  # version 0 has no checkpoint
            continue
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        newest = version
        for sample in samples:
            ids = torch.tensor([sample["prompt_ids"] + sample["token_ids"]])
            start = len(sample["prompt_ids"])
            with torch.no_grad():
                logprobs = (policy(ids, use_cache=False).logits[0, start - 1 : -1].double() / temperature).log_softmax(-1)
            expected = logprobs.gather(-1, ids[0, start:, None])[:, 0]
            found = torch.tensor(sample["behaviour_logprobs"], dtype=torch.float64)
            worst = max(worst, (expected - found).abs().max().item())
            tokens += len(found)
    return worst, tokens, newest


if __name__ == "__main__":
    main()
