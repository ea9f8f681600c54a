"""What the learner asks of a teacher."""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor


class Teacher(Protocol):
    """A frozen model with the student's vocabulary: column v of its logits is the token that column v of the student's is."""

    def logits(
        self, input_ids_T: Int[Tensor, " T"], position_ids_T: Int[Tensor, " T"], predicting_N: Int[Tensor, " N"]
    ) -> Float[Tensor, "N V"]:
        """Logits of the next token at ``predicting_N``, not divided by a temperature, without a graph.

        The row may hold several sequences; each begins where ``position_ids_T`` restarts at 0 and sees itself only.
        Collective: all ranks call it, each with a row of its own.
        """
        ...
