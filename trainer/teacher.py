"""A Hugging Face model as a teacher, and whether it can teach a student at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from slipstream.core.mistakes import UserError
from slipstream.trainer.model import load_tokenizer, packed_logits


class HuggingFaceTeacher:
    """A ``distill.teacher.Teacher`` over a frozen model beside the learner (a DeepSpeed engine under ZeRO-3)."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def logits(self, input_ids_T: Tensor, position_ids_T: Tensor, predicting_N: Tensor) -> Tensor:
        """``[N, V]``; see the protocol."""
        return packed_logits(self._model, input_ids_T, position_ids_T, predicting_N)


def require_same_vocabulary(other: Path, trained: Path, key: str = "distill.teacher", ours: str = "student") -> None:
    """Raise UserError, naming ``key``, unless the other model's tokens are those of the trained one, one for one."""
    sizes = [AutoConfig.from_pretrained(path, local_files_only=True).get_text_config().vocab_size for path in (other, trained)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"{key}: {other} has a vocabulary of {sizes[0]} tokens, expected {sizes[1]} as in the {ours} {trained}; "
            f"take a model of the {ours}'s family, with the same vocab_size"
        )
    theirs, known = (load_tokenizer(path).get_vocab() for path in (other, trained))
    if differing := sorted(token for token in {*theirs, *known} if theirs.get(token) != known.get(token)):
        shown = ", ".join(f"{token!r} is {theirs.get(token)}, not {known.get(token)}" for token in differing[:3])
        raise UserError(
            f"{key}: the tokenizer of {other} differs from the {ours}'s ({trained}) in {len(differing)} tokens: "
            f"{shown}; take a model with the {ours}'s tokenizer"
        )
