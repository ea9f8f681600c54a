"""What a source holds, before an order is put on it; and which prompts of a generated source are held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple
from zlib import crc32

from slipstream.core.records import Message

Split = Literal["train", "eval"]
HELD_OUT_SHARE = 8  # one prompt in so many is for evaluation


class Row(NamedTuple):
    """One task of a source: ``Row("634139<", "133469", "133469")``; the fields are those of ``core.records.Task``."""

    prompt: str | tuple[Message, ...] | tuple[int, ...]
    answer: str | None = None
    completion: str | tuple[str, ...] | None = None
    columns: Mapping[str, Any] = {}


def is_held_out(prompt: str) -> bool:
    """Whether a generated prompt belongs to evaluation.

    A function of the text alone, so training and evaluation can never share a prompt, whatever their seeds and sizes.
    """
    return crc32(prompt.encode()) % HELD_OUT_SHARE == 0
