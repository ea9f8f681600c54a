"""Ready groups in a checkpoint: plain JSON, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipstream.core.records import DraftCounts, Group, Task, Trajectory, VersionSpan, WeightVersion, spans_of, versions_of


def encode_group(group: Group) -> dict[str, Any]:
    """A group as plain JSON: the place of its task, which the source gives again, and versions as spans."""
    return {
        "place": [group.task.epoch, group.task.position],
        "dispatched": str(group.dispatched),
        "trajectories": [
            {
                **{name: getattr(t, name) for name in _PLAIN},
                "policy_versions": [[str(v), a, b] for v, a, b in spans_of(t.policy_versions)],
                "kv_versions": [[str(v), a, b] for v, a, b in spans_of(t.kv_versions)],
            }
            for t in group.trajectories
        ],
    }


_PLAIN = (
    "sample_id",
    "prompt_ids",
    "token_ids",
    "loss_mask",
    "behaviour_logprobs",
    "status",
    "text",
    "reward",
    "rewards",
    "draft",
)
_TUPLES = ("prompt_ids", "token_ids", "loss_mask", "behaviour_logprobs")


def decode_group(plain: Mapping[str, Any], task_at: Callable[[int, int], Task]) -> Group:
    """The inverse of ``encode_group``; ``task_at`` gives the task of an epoch and position."""
    return Group(
        task=task_at(*plain["place"]),
        dispatched=WeightVersion.parse(plain["dispatched"]),
        trajectories=tuple(_decode_trajectory(t) for t in plain["trajectories"]),
    )


def _decode_trajectory(plain: Mapping[str, Any]) -> Trajectory:
    length = len(plain["token_ids"])

    def versions(name: str) -> tuple[WeightVersion, ...]:
        return versions_of([VersionSpan(WeightVersion.parse(v), a, b) for v, a, b in plain[name]], length)

    values: dict[str, Any] = {name: tuple(plain[name]) if name in _TUPLES else plain[name] for name in _PLAIN}
    return Trajectory(
        **{**values, "draft": DraftCounts(*values["draft"])},
        policy_versions=versions("policy_versions"),
        kv_versions=versions("kv_versions"),
    )
