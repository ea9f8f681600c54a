"""The records that travel between the parts of Slipstream.

Frozen, slotted, keyword-only.  Token ids go in and come out; text is never re-tokenised.  Sizes in the docstrings:
``P`` prompt tokens, ``L`` response tokens (sampled and observed), ``G`` siblings of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

Message = Mapping[str, str]
Status = Literal["eos", "stop", "length", "turns", "timeout", "aborted"]
"""Why a response ended: its own end token or a stop string, too few tokens left, too many turns, an environment that did not
answer in time, or called off."""


class WeightVersion(NamedTuple):
    """Which weights: ``batch`` counts committed batches, ``attempt`` counts restarts of the learner.

    Ordered by attempt, then batch, so a token sampled by weights that a restart rolled back can be told from a token of
    the same batch number sampled after it.  ``str(WeightVersion(0, 12)) == "0.12"`` is the label that vLLM carries.
    """

    attempt: int
    batch: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.batch}"

    @classmethod
    def parse(cls, label: str) -> WeightVersion:
        """The inverse of ``str``.  Raises ValueError on any label that Slipstream did not write."""
        attempt, dot, batch = label.partition(".")
        if not (dot and attempt.isdigit() and batch.isdigit()):
            raise ValueError(f"weight version: got {label!r}, expected 'ATTEMPT.BATCH' such as '0.12'")
        return cls(int(attempt), int(batch))

    def next(self) -> WeightVersion:
        """The version that the next committed batch makes."""
        return WeightVersion(self.attempt, self.batch + 1)


class VersionSpan(NamedTuple):
    """Tokens ``[start, end)`` of a response carry ``version``."""

    version: WeightVersion
    start: int
    end: int


class DraftCounts(NamedTuple):
    """Speculation of one response: ``rounds`` verified ``drafted`` tokens and took ``accepted`` of them over."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def plus(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.rounds + other.rounds, self.drafted + other.drafted, self.accepted + other.accepted)


NO_DRAFTS = DraftCounts()


def spans_of(versions: Sequence[WeightVersion]) -> list[VersionSpan]:
    """Run-length form of per-token versions: ``[a, a, b]`` -> ``[(a, 0, 2), (b, 2, 3)]``."""
    spans, start = [], 0
    for version, run in groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append(VersionSpan(version, start, end))
        start = end
    return spans


def versions_of(spans: Iterable[VersionSpan], length: int) -> tuple[WeightVersion, ...]:
    """Per-token versions ``[length]`` from spans.  Raises ValueError if the spans do not tile ``[0, length)``."""
    versions: list[WeightVersion] = []
    for span in spans:
        if span.start != len(versions) or span.end < span.start:
            raise ValueError(f"version spans do not tile the response: {span} after {len(versions)} tokens")
        versions.extend([span.version] * (span.end - span.start))
    if len(versions) != length:
        raise ValueError(f"version spans cover {len(versions)} tokens, expected {length}")
    return tuple(versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt to answer.  ``Task(id="train/0/17", epoch=0, position=17, prompt="634139<", answer="133469")``.

    ``prompt`` is text, a list of chat messages, or token ids.  ``completion`` is a demonstration, where the source has one
    (the ``ce`` stream trains on it); over several turns, texts of the policy and of the environment in turn.  ``columns`` are
    the source's other columns, handed to the reward functions.
    Which task stands at a position is a pure function of (seed, epoch, position).
    """

    id: str
    epoch: int
    position: int
    prompt: str | tuple[Message, ...] | tuple[int, ...]
    answer: str | None = None
    completion: str | tuple[str, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One response, token by token.

    ``prompt_ids`` [P]; the rest [L].  ``loss_mask`` is True where the policy wrote the token, False on observations.
    ``behaviour_logprobs`` are vLLM's own, of the distribution it sampled from (0.0 on observations).
    ``policy_versions`` sampled the token; ``kv_versions`` is the oldest version among the KV entries it attended to.
    ``rewards`` holds each part by name, unweighted; ``reward`` is the weighted sum.  ``draft`` counts speculation.
    ``text`` is what graders see, the policy's last turn.

    Example: prompt ``[1, 9, 4]``, tokens ``[4, 9, 2]``, mask ``[True] * 3``, log-probs ``[-.1, -.2, -.01]``,
    policy versions ``[0.3, 0.3, 0.4]``, KV versions ``[0.3, 0.3, 0.3]``, rewards ``{"exact": 1.0}``, status ``"eos"``.
    """

    sample_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    behaviour_logprobs: tuple[float, ...]
    policy_versions: tuple[WeightVersion, ...]
    kv_versions: tuple[WeightVersion, ...]
    status: Status
    text: str = ""
    reward: float = 0.0
    rewards: Mapping[str, float] = field(default_factory=dict)
    draft: DraftCounts = NO_DRAFTS

    def __post_init__(self) -> None:
        for name in ("loss_mask", "behaviour_logprobs", "policy_versions", "kv_versions"):
            found, expected = len(getattr(self, name)), len(self.token_ids)
            if found != expected:
                raise ValueError(f"trajectory {self.sample_id}: {name} has {found} entries, expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G siblings of one task, complete and graded.  ``dispatched`` is the newest confirmed version at dispatch.

    A failed grader or engine never becomes a reward of 0: it makes no Group at all (see ``cluster.flow``).
    """

    task: Task
    dispatched: WeightVersion
    trajectories: tuple[Trajectory, ...]

    @property
    def oldest(self) -> WeightVersion:
        """v0: the version of the oldest token, or the dispatch version while there is none."""
        return min((min(t.policy_versions) for t in self.trajectories if t.policy_versions), default=self.dispatched)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A response as the steps of a decision process, for a critic: ``rewards`` and ``actions``, both [L].

    The response's score falls on its last action (a token that the policy wrote), a KL penalty on each; an observation is no
    step and earns nothing.  Example: a score of 1 over (token, observation, token): ``rewards=(0., 0., 1.)``,
    ``actions=(True, False, True)``.
    """

    rewards: tuple[float, ...]
    actions: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One sequence with what each token is to contribute.  Everything but ``input_ids`` [P+L] is per response token [L].

    The learner knows streams, not algorithms: ``rl`` weighs the policy loss (and the KL term) of the token, ``ce`` its
    cross-entropy, ``distill`` the divergence from the teacher where it was written.  A weight of 0 leaves the token out of
    that stream.  Weights already hold the reduction (token mean, sequence mean, …); the batch holds the global denominators.
    ``lag`` is the token's, in batches, fixed at assembly.  With ``steps`` the learner replaces the advantages by those that its
    critic makes of them; None where there is no critic.

    Example: ``input_ids=(1, 9, 4, 4, 9, 2)``, ``prompt_length=3``, ``rl=(1., 1., 0.)`` (the last token was stale),
    ``ce=(0., 0., 0.)``, ``distill=(0., 0., 0.)``, ``advantages=(.5, .5, .5)``,
    ``behaviour_logprobs=(-.1, -.2, -.01)``, ``lag=(0, 0, 3)``.
    """

    sample_id: str
    input_ids: tuple[int, ...]
    prompt_length: int
    rl: tuple[float, ...]
    ce: tuple[float, ...]
    distill: tuple[float, ...]
    advantages: tuple[float, ...]
    behaviour_logprobs: tuple[float, ...]
    lag: tuple[int, ...]
    steps: Steps | None = None

    def __post_init__(self) -> None:
        length = len(self.input_ids) - self.prompt_length
        streams = {n: getattr(self, n) for n in ("rl", "ce", "distill", "advantages", "behaviour_logprobs", "lag")}
        if self.steps is not None:
            streams |= {"steps.rewards": self.steps.rewards, "steps.actions": self.steps.actions}
        for name, stream in streams.items():
            if len(stream) != length:
                raise ValueError(f"sample {self.sample_id}: {name} has {len(stream)} entries, expected {length}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What one commit of the learner trains on.  ``version`` is the learner's when the batch was assembled.

    ``minibatches`` holds tuples of samples, one optimizer step each, in order; each is a partition element of one epoch.
    ``rl_denominators``, ``ce_denominators`` and ``distill_denominators`` hold, per mini-batch, the global denominator of that
    stream (over all ranks and micro-batches); 0.0 where the stream is empty.
    """

    version: WeightVersion
    minibatches: tuple[tuple[TrainSample, ...], ...]
    rl_denominators: tuple[float, ...]
    ce_denominators: tuple[float, ...]
    distill_denominators: tuple[float, ...]
