"""TRL's side of vs_trl.py, run by the Python of TRL's own environment: ``python trl_side.py SPEC.json RESULT.json``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def exact_reward(after: str | None, eos_id: int, sampled: list[int]) -> Any:
    """Slipstream's ``exact``: what follows the last ``after``, in a response that has ended; ``sampled`` takes token counts."""

    def exact(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        sampled.append(sum(map(len, completion_ids)))
        texts = [c.rpartition(after)[2] if after else c for c in completions]
        return [float(t.strip() == a and ids[-1] == eos_id) for t, a, ids in zip(texts, answer, completion_ids, strict=True)]

    return exact


class Clock(TrainerCallback):
    """When each optimizer step ended, in seconds since the process began."""

    def __init__(self, started: float) -> None:
        self.started, self.ends = started, []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter() - self.started)


def main(spec_path: str, result_path: str) -> None:
    started = time.perf_counter()
    spec = json.loads(Path(spec_path).read_text())
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    samples_per_step = spec["groups_per_step"] * spec["group_size"]
    config = GRPOConfig(
        output_dir=spec["work"],
        use_cpu=True,
        bf16=False,
        seed=spec["seed"],
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=samples_per_step,
        num_generations=spec["group_size"],
        max_completion_length=spec["max_tokens"],
        temperature=1.0,
        use_transformers_continuous_batching=spec["continuous_batching"],
        max_steps=spec["steps"],
        beta=0.0,
        loss_type="dapo",
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        adam_beta1=spec["betas"][0],
        adam_beta2=spec["betas"][1],
        max_grad_norm=1.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    sampled: list[int] = []
    clock = Clock(started)
    trainer = GRPOTrainer(
        model=spec["model"],
        reward_funcs=exact_reward(spec["after"], tokenizer.eos_token_id, sampled),
        args=config,
        train_dataset=Dataset.from_list(spec["rows"]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    logs = [line for line in trainer.state.log_history if "reward" in line]
    result = {
        "step_ends": clock.ends,
        "sampled_tokens": sampled,
        "samples_per_step": samples_per_step,
        "rewards": [line["reward"] for line in logs],
        "no_signal": [line["frac_reward_zero_std"] for line in logs],
    }
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
