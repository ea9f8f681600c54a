"""Rewards that differ within nearly every group, so that nearly every sampled response is trained on."""

from __future__ import annotations

from typing import Any


def distinct_characters(completions: list[str], **_: Any) -> list[float]:
    """How many different characters a response has, over 100: the untrained 135M model can vary in it."""
    return [len(set(completion)) / 100 for completion in completions]


def digits_in_place(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Share of the digits after the last ``=`` that stand where they should, as long answers are seldom right throughout."""
    return [_share(completion.rpartition("=")[2], right) for completion, right in zip(completions, answer, strict=True)]


def _share(found: str, right: str) -> float:
    return sum(a == b for a, b in zip(found, right, strict=False)) / max(len(found), len(right))
