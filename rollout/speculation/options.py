"""What vLLM is told about drafts, from the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.core.speculation import DRAWING, Speculation


def speculative_config(speculation: Speculation, draft: Path | None, tensor_parallel: int) -> dict[str, Any] | None:
    """vLLM's ``speculative_config``; None without speculation.  ``draft`` is the folder that ``speculation.draft`` means."""
    if not speculation.on:
        return None
    method = speculation.method
    config: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": speculation.tokens,
        "rejection_sample_method": speculation.rejection,
    }
    if draft is not None:
        config["model"] = str(draft)
    if method in DRAWING:
        config["draft_sample_method"] = speculation.draws
    if method == "draft_model":
        config["draft_tensor_parallel_size"] = tensor_parallel
        config["use_heterogeneous_vocab"] = speculation.universal
    if method == "ngram":
        config |= {"prompt_lookup_min": speculation.lookup_min, "prompt_lookup_max": speculation.lookup_max}
    if speculation.synthetic_length is not None:
        config["synthetic_acceptance_length"] = speculation.synthetic_length
    if speculation.tokens_by_batch:
        config["num_speculative_tokens_per_batch_size"] = [tuple(row) for row in speculation.tokens_by_batch]
    return config
