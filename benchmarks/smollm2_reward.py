"""A reward that the untrained 135M model can vary in; smollm2.yaml names it."""

from __future__ import annotations

from typing import Any


def distinct_characters(completions: list[str], **_: Any) -> list[float]:
    """How many different characters a response has, over 100."""
    return [len(set(completion)) / 100 for completion in completions]
