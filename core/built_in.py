"""Built-in environments and reward functions by name, and the options they take; any other name is the user's ``module:name``.

Only what a recipe says of them is here, so that it is checked without importing what does the work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import Field, field_validator

from slipstream.core import schema
from slipstream.core.mistakes import UserError, did_you_mean
from slipstream.core.recipe_problems import gathered, options_of
from slipstream.core.section import Problems, Section

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class CalculatorOptions(Section):
    """Options of the environment ``calculator``."""

    opening: str = Field("<calc>", min_length=1)
    closing: str = Field("</calc>", min_length=1)


class ExactOptions(Section):
    after: str | None = Field(None, min_length=1, description="the answer is what follows the last occurrence of this text")
    require_eos: bool = Field(True, description="a response that was cut off is wrong")


class RegexOptions(Section):
    pattern: str = Field(description="with one group, which is compared with the answer; the last match counts")
    require_eos: bool = False

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"got {pattern!r}, which is no regular expression ({error})") from None
        if groups != 1:
            raise ValueError(f"got {pattern!r} with {groups} groups, expected exactly one; (?:…) groups without capturing")
        return pattern


class GraderOptions(Section):
    require_eos: bool = False


ENVIRONMENTS: dict[str, type[Section]] = {"single_turn": Section, "calculator": CalculatorOptions, "guess_number": Section}
REWARDS: dict[str, type[Section]] = {
    "exact": ExactOptions,
    "environment": Section,
    "regex": RegexOptions,
    "math": GraderOptions,
    "reasoning_gym": GraderOptions,
}
WITHOUT_SCORE = ("single_turn", "calculator")
"""Environments that cannot be the reward ``environment``."""
WITHOUT_CLOCK = ("exact", "environment")
"""Reward functions that need no process, and no ``reward.timeout_s``."""


def environment_options(environment: schema.Environment) -> Any:
    """The options of ``rollout.environment``: checked where it is built in, as they are where it is ``module:Class``.

    Raises UserError for a name that is neither, or options that the built-in does not have, all of them.
    """
    _require_name(environment.name, ENVIRONMENTS, "rollout.environment.name", "module:Class")
    return _options(environment.name, ENVIRONMENTS, environment.options, "rollout.environment.options")


def reward_options(part: schema.RewardPart, key: str) -> Any:
    """The same of one of the ``reward.parts``, which stands at ``key``."""
    _require_name(part.function, REWARDS, f"{key}.function", "module:function")
    return _options(part.function, REWARDS, part.options, f"{key}.options")


def problems(recipe: schema.Recipe) -> Problems:
    """What the recipe gets wrong about built-ins, as (key, problem).  The user's own are imported when the run starts."""
    checks: list[Callable[[], Any]] = [partial(environment_options, recipe.rollout.environment)]
    checks += [partial(reward_options, part, f"reward.parts[{i}]") for i, part in enumerate(recipe.reward.parts)]
    return gathered(checks)


def _require_name(name: str, known: Mapping[str, type[Section]], key: str, dotted: str) -> None:
    if name not in known and not DOTTED.fullmatch(name):
        meant = did_you_mean(name, known)
        raise UserError(f"{key}: got {name!r}, expected {', '.join(known)} or {dotted}{meant}")


def _options(name: str, known: Mapping[str, type[Section]], given: Mapping[str, Any], key: str) -> Any:
    return options_of(known[name], given, key) if name in known else given
