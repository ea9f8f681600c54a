"""What of its recipe a run keeps for good, whatever a resume overrides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slipstream.core.mistakes import UserError
from slipstream.core.recipe import dump_recipe
from slipstream.core.schema import Recipe
from slipstream.rollout.files import digest
from slipstream.rollout.tasks import is_file

_MAY_CHANGE = (
    "schedule.steps", "schedule.max_idle_groups", "data.epochs", "checkpoint.", "monitor.", "cluster.",
    "rollout.engines", "rollout.max_num_seqs", "rollout.kv_cache_gib", "rollout.gpu_memory_utilization",
    "rollout.tensor_parallel", "rollout.enforce_eager", "rollout.prefix_caching", "rollout.environment.timeout_s",
    "rollout.speculation.tts.share_every_s",
    "reward.timeout_s", "reward.workers",
    "trainer.ranks", "trainer.zero_stage", "trainer.max_tokens_per_microbatch", "trainer.bucket_mib",
)  # fmt: skip
"""Keys (and sections) that an override of ``resume`` may touch: how far and where a run goes, not what it learns."""
_HELD_OUT = ("monitor.eval.source", "monitor.eval.options", "monitor.eval.size")
"""Which rows of a file are held out of training, so that a file's tasks would be others after a change of these."""
_ROWS = "data.source (digest)"
"""Places in the data, and prompts of the groups that a checkpoint holds, are of these rows."""


def fixed_keys(recipe: Recipe) -> dict[str, Any]:
    """Every key that a resume cannot change, with secrets redacted; and, of a file, a digest of the rows."""
    leaves = _leaves(yaml.safe_load(dump_recipe(recipe)), "")
    of_file = is_file(recipe.data.source)
    held_out = _HELD_OUT if of_file else ()
    fixed = {key: value for key, value in leaves.items() if key.startswith(held_out) or not key.startswith(_MAY_CHANGE)}
    return fixed | ({_ROWS: digest(Path(recipe.data.source))} if of_file else {})


def _leaves(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


def require_same(recipe: Recipe, saved: Mapping[str, Any], sections: tuple[str, ...] = ("",)) -> None:
    """Raise UserError if, within ``sections``, the recipe differs from ``saved``, the ``fixed_keys`` of the run's own."""
    wanted = fixed_keys(recipe)
    changed = [
        f"{key}: got {wanted.get(key)}, expected {saved.get(key)}"
        for key in sorted({*wanted, *saved})
        if key != _ROWS and key.startswith(sections) and wanted.get(key) != saved.get(key)
    ]
    now, then = wanted.get(_ROWS), saved.get(_ROWS)
    if _ROWS.startswith(sections) and None not in (now, then) and now != then and wanted["data.source"] == saved["data.source"]:
        changed.append(f"data.source: {recipe.data.source} does not hold the rows that the run began with; put them back")
    if changed:
        raise UserError("\n".join([*changed, "these stay as they were when the run began; start a new run to change them"]))
