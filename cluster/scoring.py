"""Responses under the learner's frozen models: the reference, which rewards are charged for leaving, and the teacher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.algos.kl import adapted_coefficient
from slipstream.core.metrics import Last, Metrics
from slipstream.core.records import Group, TrainSample, Trajectory
from slipstream.core.schema import Recipe

if TYPE_CHECKING:
    from slipstream.cluster.learners import LearnerGroup


@dataclass(frozen=True, slots=True)
class Penalty:
    """KL to the reference, to be taken off the rewards: ``coefficient`` · the ``gaps`` of each response token, by sample."""

    coefficient: float
    gaps: Mapping[str, Sequence[float]]


class Scoring:
    """Asks the reference and the teacher, as far as the recipe has them, and holds the coefficient of the KL in the reward."""

    def __init__(self, recipe: Recipe, learners: LearnerGroup, coefficient: float | None) -> None:
        """``coefficient`` is the adaptive one of a checkpoint; None is the recipe's."""
        self._recipe = recipe
        self._learners = learners
        self.coefficient = recipe.algo.kl.coefficient if coefficient is None else coefficient

    async def penalty(self, groups: Sequence[Group]) -> Penalty | None:
        """None where the KL is not in the reward."""
        if not self._recipe.algo.kl_in_reward:
            return None
        return Penalty(self.coefficient, gaps(groups, await self._learners.logprobs(samples_of(groups), "reference")))

    async def teacher_gaps(self, groups: Sequence[Group]) -> dict[str, tuple[float, ...]] | None:
        """None where no teacher is in the advantages."""
        if self._recipe.teaches != "policy_gradient":
            return None
        return gaps(groups, await self._learners.logprobs(samples_of(groups), "teacher"))

    def charged(self, penalty: Penalty | None, batch: int) -> Metrics:
        """What the rewards of batch number ``batch`` were charged; an adaptive coefficient follows, once the policy moves."""
        if penalty is None:
            return {}
        kl, critic, samples = self._recipe.algo.kl, self._recipe.algo.critic, len(penalty.gaps)
        policy_rests = critic is not None and batch <= critic.warmup_batches
        if kl.target is not None and not policy_rests:
            observed = sum(map(sum, penalty.gaps.values())) / samples
            self.coefficient = adapted_coefficient(
                penalty.coefficient, observed, target=kl.target, horizon=kl.horizon, samples=samples
            )
        return {"kl/coefficient": Last(penalty.coefficient)}


def samples_of(groups: Iterable[Group]) -> list[TrainSample]:
    """Whole trajectories with no weights yet, for scoring by the reference or the teacher; an empty response has no score."""
    return [bare_sample(t) for group in groups for t in group.trajectories if t.token_ids]


def gaps(groups: Sequence[Group], other_logprobs: Sequence[Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """log π_b − log π_other of each response token, by sample: k1 under the policy that sampled it; 0 on observations.

    ``other_logprobs`` are those of ``samples_of(groups)``.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    known = dict(zip([sample.sample_id for sample in samples_of(groups)], other_logprobs, strict=True))
    return {
        t.sample_id: tuple(
            behaviour - other if mine else 0.0
            for behaviour, other, mine in zip(t.behaviour_logprobs, known.get(t.sample_id, ()), t.loss_mask, strict=True)
        )
        for t in trajectories
    }


def bare_sample(trajectory: Trajectory) -> TrainSample:
    """A response without weights."""
    zeros = (0.0,) * len(trajectory.token_ids)
    return TrainSample(
        sample_id=trajectory.sample_id,
        input_ids=trajectory.prompt_ids + trajectory.token_ids,
        prompt_length=len(trajectory.prompt_ids),
        rl=zeros,
        ce=zeros,
        distill=zeros,
        advantages=zeros,
        behaviour_logprobs=trajectory.behaviour_logprobs,
        lag=(0,) * len(zeros),
    )
