"""A Hugging Face model as a teacher, and whether it can teach a student at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from slipstream.trainer.model import load_tokenizer, packed_logits


class HuggingFaceTeacher:
    """A ``distill.teacher.Teacher`` over a frozen model beside the learner (a DeepSpeed engine under ZeRO-3)."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def logits(self, input_ids_T: Tensor, position_ids_T: Tensor, predicting_N: Tensor) -> Tensor:
        """``[N, V]``; see the protocol."""
        return packed_logits(self._model, input_ids_T, position_ids_T, predicting_N)


def require_same_vocabulary(teacher: Path, student: Path) -> None:
    """Raise ValueError unless the teacher's logits are over the student's tokens, one for one."""
    sizes = [
        AutoConfig.from_pretrained(path, local_files_only=True).get_text_config().vocab_size for path in (teacher, student)
    ]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"distill.teacher: {teacher} has logits over {sizes[0]} tokens, expected {sizes[1]} as in the student {student}; "
            "take a teacher of the student's family, with the same vocab_size"
        )
    theirs, ours = (load_tokenizer(path).get_vocab() for path in (teacher, student))
    if differing := sorted(token for token in {*theirs, *ours} if theirs.get(token) != ours.get(token)):
        shown = ", ".join(f"{token!r} is {theirs.get(token)}, not {ours.get(token)}" for token in differing[:3])
        raise ValueError(
            f"distill.teacher: the tokenizer of {teacher} differs from the student's ({student}) in {len(differing)} tokens: "
            f"{shown}; take a teacher with the student's tokenizer"
        )
