"""The policy of benchmarks/tts.py, the drafts made for it, and responses of both the policy and a fine-tuned one."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import HERE, WORK, say, slipstream
from torch import Tensor

RECIPE = HERE / "tts.yaml"
TEMPERATURE, TOKENS = 0.8, 4
PROMPTS = (
    "Write a very long, detailed story about a lighthouse keeper, chapter by chapter.",
    "Write a very long and detailed guide to growing apples, with many sections.",
    "Write a long dialogue between two friends about fractions, with many turns.",
    "List fifty Python functions with their code, one after the other, each with a docstring.",
    "Write a JSON array of one hundred records of employees with name, age, city and salary.",
    "Work out 37 × 24, 58 × 19, 46 × 73, 91 × 65 and 28 × 84 step by step, explaining every step.",
)


MOVED = {"steps": 24, "width": 192, "batch": 2, "lr": 1e-4}
"""The fine-tuning."""


def _key(*made_of: Any) -> str:
    """Of what is made once: another for other ingredients."""
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:10]


def made_head() -> Path:
    """The EAGLE-3 head of ``RECIPE``."""
    return made("smollm2-eagle3")


def made_model() -> Path:
    """A small model as draft: the policy's first layers, trained on its responses to the same prompts."""
    training = "{samples: 48, steps: 80, lr: 5.0e-4, first_layers: 4, features: null, vocabulary: null}"
    return made("smollm2-first4", "rollout.speculation.method=draft_model", f"rollout.speculation.training={training}")


def made(name: str, *overrides: str) -> Path:
    source = HERE / "tts_prompts.jsonl"
    path = WORK / "models" / f"{name}-{_key(RECIPE.read_text(), source.read_text(), *overrides)}"
    if not path.is_dir():
        say(f"making {name}")
        draft = [f"data.source={source}", f"rollout.speculation.draft={path}"]
        slipstream("draft", "train", str(RECIPE), *draft, *overrides, "--quiet")
    return path


def load_policy() -> tuple[Any, Any]:
    from slipstream.cluster.models import CACHE
    from slipstream.core.recipe import load_recipe
    from slipstream.trainer.model import load_policy, load_tokenizer, resolve_model

    recipe = load_recipe([RECIPE], [])
    path = resolve_model(recipe.model, recipe.seed, CACHE)
    return load_policy(path, recipe.model).eval().requires_grad_(False), load_tokenizer(path)


def record(policy: Any, tokenizer: Any, prompts: list[int], length: int, whose: str) -> Iterator[tuple[int, Tensor, int]]:
    """Responses of exactly ``length`` tokens, sampled once and kept; prompt and response ids, and the prompt's length."""
    file = WORK / f"tts-responses-{whose}-{length}-{_key(*PROMPTS, TEMPERATURE, MOVED)}.pt"
    known: dict[int, tuple[Tensor, int]] = torch.load(file) if file.is_file() else {}
    if missing := [number for number in prompts if number not in known]:
        say(f"recording {length} tokens of prompts {missing}")
        rows = [encoded(tokenizer, number) for number in missing]
        width = max(map(len, rows))
        torch.manual_seed(0)
        torch.set_num_threads(2)
        found = policy.generate(
            torch.tensor([[0] * (width - len(row)) + row for row in rows]),
            attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length,
            suppress_tokens=ending(policy),
            use_cache=True,
        )
        torch.set_num_threads(1)
        known |= {number: (ids[width - len(row) :], len(row)) for number, row, ids in zip(missing, rows, found, strict=True)}
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(known, file)
    for number in prompts:
        yield (number, *known[number])


def encoded(tokenizer: Any, number: int) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPTS[number]}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text).input_ids


def ending(policy: Any) -> list[int]:
    ends = policy.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


def fine_tuned(policy: Any, tokenizer: Any, steps: int, width: int, batch: int, lr: float) -> Any:
    """The policy after a few steps on source code of Python's own library, kept for the next time."""
    from transformers import AutoModelForCausalLM

    path = WORK / "models" / f"smollm2-moved-{_key(MOVED)}"
    if not path.is_dir():
        say("fine-tuning the policy")
        torch.set_num_threads(2)
        moved = type(policy)(policy.config)
        moved.load_state_dict(policy.state_dict())
        ids = torch.tensor(
            tokenizer("".join(inspect.getsource(module) for module in (argparse, asyncio.tasks, inspect))).input_ids
        )
        rows = ids[: len(ids) // width * width].view(-1, width)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.AdamW(moved.parameters(), lr=lr)
        for step in range(steps):
            chosen = rows[order[torch.arange(step * batch, (step + 1) * batch) % len(rows)]]
            loss = moved(chosen, labels=chosen, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.set_num_threads(1)
        moved.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
