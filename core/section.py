"""What every section of a recipe is, and the ranges of its numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(gt=0.0)]
Problems = list[tuple[str, str]]
"""Broken rules between keys, as (key, problem)."""


class Section(BaseModel):
    """Unknown keys are errors, so are NaN and infinities; nothing is coerced silently; nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, frozen=True, validate_default=True)

    def changed(self, *keys: str) -> list[str]:
        """Those of the keys that differ from their defaults: a recipe that a run wrote down has every key."""
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]
