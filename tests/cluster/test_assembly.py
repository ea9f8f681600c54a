"""From groups to a batch, on literal groups: stale tokens, advantages, denominators, records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slipstream.algos.advantages import has_signal
from slipstream.cluster import staleness
from slipstream.cluster.assembly import assemble, assemble_demonstrations, overlong_reward, sample_record
from slipstream.cluster.scoring import Penalty, Scoring, gaps, samples_of
from slipstream.cluster.staleness import loss_mask, staleness_metrics
from slipstream.core.metrics import values
from slipstream.core.records import Group, Task, TrainSample, Trajectory, WeightVersion
from slipstream.core.schema import Recipe, Schedule
from slipstream.trainer.packing import pack


def recipe(
    *, bound: int = 1, distill: dict[str, Any] | None = None, schedule: dict[str, Any] | None = None, **algo: Any
) -> Recipe:
    """Dr.GRPO unless told otherwise: reward minus the mean of the group, so that advantages are easy to derive."""
    return Recipe.model_validate(
        {
            "name": "test",
            "model": {"path": "builtin:tiny"},
            "data": {"source": "builtin:number_sorting"},
            "algo": {"name": "dr_grpo", "reduction": "token_mean", **algo},
            "distill": distill or {},
            "rollout": {"sampling": {"max_tokens": 4}},
            "schedule": {"max_staleness": bound, "groups_per_step": 8, **(schedule or {})},
        }
    )


def response(name: str, reward: float, *batches: int, observed: tuple[int, ...] = ()) -> Trajectory:
    """One token per entry of ``batches``, the batch of the version that sampled it; ``observed`` positions are not its own."""
    length = len(batches)
    return Trajectory(
        sample_id=name,
        prompt_ids=(5, 6, 47),
        token_ids=tuple(range(4, 4 + length)),
        loss_mask=tuple(i not in observed for i in range(length)),
        behaviour_logprobs=tuple(-0.5 * (i + 1) for i in range(length)),
        policy_versions=tuple(WeightVersion(0, batch) for batch in batches),
        kv_versions=(WeightVersion(0, batches[0]),) * length,
        status="eos",
        text="x" * length,
        reward=reward,
        rewards={"exact": reward},
    )


def group(name: str, *trajectories: Trajectory) -> Group:
    return Group(
        task=Task(id=name, epoch=0, position=0, prompt="12<"), dispatched=WeightVersion(0, 0), trajectories=trajectories
    )


def assembled(
    groups: list[Group], version: WeightVersion, recipe: Recipe, *more: Any, context: int = 2048, **named: Any
) -> Any:
    return assemble(groups, version, recipe, context, *more, **named)


def by_name(batch: Any) -> dict[str, TrainSample]:
    return {sample.sample_id: sample for part in batch.minibatches for sample in part}


NOW = WeightVersion(0, 3)
EMPTY: dict[str, Any] = dict.fromkeys(("token_ids", "loss_mask", "behaviour_logprobs", "policy_versions", "kv_versions"), ())


def test_stale_tokens_weigh_nothing_and_every_sibling_counts_in_the_statistics() -> None:
    """Learner at 3, bound 1: batches 2 and 3 are fresh, 1 is stale.

    b is stale throughout, so it is left out of the batch; its reward of 0 still counts in the mean, (1 + 0 + 0.5) / 3 = 0.5.
    """
    groups = [group("g", response("a", 1.0, 1, 2, 3), response("b", 0.0, 1, 1), response("c", 0.5, 3, 3))]
    made = assembled(groups, NOW, recipe())
    samples = by_name(made.batch)
    assert set(samples) == {"a", "c"}
    assert samples["a"].rl == (0.0, 1.0, 1.0) and samples["a"].advantages == (0.5, 0.5, 0.5)
    assert samples["c"].rl == (1.0, 1.0) and samples["c"].advantages == (0.0, 0.0)
    assert samples["a"].input_ids == (5, 6, 47, 4, 5, 6) and samples["a"].prompt_length == 3
    assert samples["a"].behaviour_logprobs == (-0.5, -1.0, -1.5)
    assert made.batch.rl_denominators == (4.0,) and made.batch.ce_denominators == (0.0,)  # 2 of a, 2 of c
    assert made.batch.version == NOW
    outcomes = {record["sample_id"]: record["outcome"] for record in made.records}
    assert outcomes == {"a": "trained", "b": "stale", "c": "trained"}


def test_a_token_that_the_policy_did_not_write_weighs_nothing() -> None:
    observed = response("a", 1.0, 3, 3, 3, observed=(1,))
    assert loss_mask(observed, NOW, Schedule(max_staleness=1)) == [True, False, True]
    made = assembled([group("g", observed, response("b", 0.0, 3))], NOW, recipe())
    assert by_name(made.batch)["a"].rl == (1.0, 0.0, 1.0) and made.batch.rl_denominators == (3.0,)


def test_denominators_are_those_of_each_mini_batch() -> None:
    """Three groups in two mini-batches: round(1.5) = 2 groups, then 1.  Tokens: 2 + 1 + 3 + 1 = 7, then 1 + 4 = 5."""
    groups = [
        group("g", response("g0", 1.0, 3, 3), response("g1", 0.0, 3)),
        group("h", response("h0", 1.0, 3, 3, 3), response("h1", 0.0, 3)),
        group("i", response("i0", 1.0, 3), response("i1", 0.0, 3, 3, 3, 3)),
    ]
    batch = assembled(groups, NOW, recipe(minibatches=2)).batch
    assert [[s.sample_id for s in part] for part in batch.minibatches] == [["g0", "g1", "h0", "h1"], ["i0", "i1"]]
    assert batch.rl_denominators == (7.0, 5.0)


@pytest.mark.parametrize(
    ("reduction", "weights_a", "weights_c", "denominator"),
    [
        ("token_mean", (0.0, 1.0, 1.0), (1.0,), 3.0),  # three fresh tokens
        ("sequence_mean", (0.0, 0.5, 0.5), (1.0,), 2.0),  # two sequences with a fresh token
        ("constant", (0.0, 1.0, 1.0), (1.0,), 12.0),  # three sequences, the stale one too, times max_tokens = 4
    ],
)
def test_reductions(reduction: str, weights_a: tuple[float, ...], weights_c: tuple[float, ...], denominator: float) -> None:
    groups = [group("g", response("a", 1.0, 1, 2, 3), response("b", 0.0, 1), response("c", 0.5, 3))]
    batch = assembled(groups, NOW, recipe(reduction=reduction)).batch
    samples = by_name(batch)
    assert samples["a"].rl == weights_a and samples["c"].rl == weights_c
    assert batch.rl_denominators == (denominator,)


def test_kl_in_the_reward_is_taken_off_before_the_advantages() -> None:
    """Σ (log π_b − log π_ref) over own tokens: a (−0.5 + 1) + (−1 + 1) = 0.5, its last token being observed; b −0.5 + 2 = 1.5.

    With coefficient 0.2: rewards 1 − 0.1 = 0.9 and 0 − 0.3 = −0.3, mean 0.3, advantages ±0.6.
    """
    groups = [group("g", response("a", 1.0, 3, 3, 3, observed=(2,)), response("b", 0.0, 3))]
    found = gaps(groups, [[-1.0, -1.0, -9.0], [-2.0]])
    assert found == {"a": (0.5, 0.0, 0.0), "b": (1.5,)}
    kl = {"coefficient": 0.2, "placement": "reward", "estimator": "k1"}
    made = assembled(groups, NOW, recipe(kl=kl), Penalty(0.2, found))
    samples = by_name(made.batch)
    assert samples["a"].advantages == pytest.approx([0.6] * 3) and samples["b"].advantages == pytest.approx([-0.6])
    record = made.records[0]
    assert record["reward"] == pytest.approx(0.9) and record["rewards"] == {"exact": 1.0, "kl": 0.5}


def test_a_mini_batch_without_an_advantage_makes_no_step() -> None:
    """REINFORCE, two mini-batches of a group each.  All rewards 1: no advantage, so no denominator, and no step of Adam's.

    With a reward of 0 in the second group the mean is 3/4, and both have one.  A KL term is a gradient of its own.
    """

    def of(second: float, **algo: Any) -> tuple[float, ...]:
        groups = [
            group("g", response("g0", 1.0, 3, 3), response("g1", 1.0, 3)),
            group("h", response("h0", 1.0, 3), response("h1", second, 3)),
        ]
        return assembled(groups, NOW, recipe(name="reinforce", minibatches=2, **algo)).batch.rl_denominators

    assert of(1.0) == (0.0, 0.0) and of(0.0) == (3.0, 2.0)
    assert of(1.0, kl={"coefficient": 0.1}) == (3.0, 2.0)
    halves = [group("g", response("g0", 1.0, 3), response("g1", 0.5, 3)), group("h", response("h0", 0.75, 3, 3, 3))]
    made = assembled(halves, NOW, recipe(name="reinforce", minibatches=2)).batch
    assert made.rl_denominators == (2.0, 0.0), "the mean is 3/4, and the second has it throughout"


PPO = {"advantage": "gae", "critic": {}}


def test_a_critic_gets_the_score_on_the_last_own_token_and_the_penalty_on_each() -> None:
    """Gaps of a: −0.5 + 1 = 0.5, −1 + 1 = 0, observed 0; of b: −0.5 + 2 = 1.5.  With coefficient 0.2, a earns −0.1, then 0 + 1.

    The stale token (learner at 3, bound 1) weighs nothing and is a step all the same; records show the penalised rewards.
    """
    groups = [group("g", response("a", 1.0, 1, 3, 3, observed=(2,)), response("b", 0.5, 3))]
    penalty = Penalty(0.2, gaps(groups, [[-1.0, -1.0, -9.0], [-2.0]]))
    kl = {"coefficient": 0.2, "placement": "reward", "estimator": "k1"}
    made = assembled(groups, NOW, recipe(**PPO, kl=kl), penalty)
    samples = by_name(made.batch)
    a, b = samples["a"].steps, samples["b"].steps
    assert a is not None and b is not None
    assert a.rewards == pytest.approx((-0.1, 1.0, 0.0)) and a.actions == (True, True, False)
    assert b.rewards == pytest.approx((0.5 - 0.3,)) and samples["a"].rl == (0.0, 1.0, 0.0)
    assert made.records[0]["reward"] == pytest.approx(0.9) and made.records[0]["rewards"] == {"exact": 1.0, "kl": 0.5}
    assert made.records[0]["advantage"] is None, "the learner makes one for each token"
    assert values(made.metrics)["reward/kl"] == pytest.approx(1.0)


def test_a_critic_sees_the_overlong_punishment_and_no_other_algorithm_has_steps() -> None:
    """Soft 1/2 of 4 tokens: four written cost 1."""
    groups = [group("g", response("a", 1.0, 3, 3, 3, 3), response("b", 0.5, 3))]
    (steps, _) = (s.steps for s in assembled(groups, NOW, recipe(**PPO, overlong={"soft": 0.5})).batch.minibatches[0])
    assert steps is not None and steps.rewards == (0.0, 0.0, 0.0, 0.0)
    assert {s.steps for s in assembled(groups, NOW, recipe()).batch.minibatches[0]} == {None}


def test_equal_rewards_keep_their_group_for_a_critic() -> None:
    assert has_signal([1.0, 1.0], "gae") and not has_signal([1.0, 1.0], "grpo")


TEACHER = {"teacher": "builtin:tiny", "coefficient": 0.5}
TAUGHT = group("g", response("a", 1.0, 1, 3, 3, observed=(2,)), response("b", 0.0, 3))
"""Learner at 3, bound 1: the first token of a is stale, its last was observed; one token of each is left."""


@pytest.mark.parametrize(
    ("advantage", "rl", "rl_denominator"),
    [("none", (0.0, 0.0, 0.0), 0.0), ("dr_grpo", (0.0, 1.0, 0.0), 2.0)],  # a teacher alone; mixed with the reward
)
def test_a_teacher_judges_the_fresh_tokens_that_the_policy_wrote(advantage: str, rl: tuple, rl_denominator: float) -> None:
    made = assembled([TAUGHT], NOW, recipe(distill=TEACHER, advantage=advantage))
    samples = by_name(made.batch)
    assert samples["a"].distill == (0.0, 1.0, 0.0) and samples["b"].distill == (1.0,)
    assert made.batch.distill_denominators == (2.0,)
    assert samples["a"].rl == rl and made.batch.rl_denominators == (rl_denominator,)
    assert samples["a"].behaviour_logprobs == (-0.5, -1.0, -1.5)
    assert {record["outcome"] for record in made.records} == {"trained"}
    assert "distill/kl" not in made.metrics, "the learner measures it over the vocabulary"


@pytest.mark.parametrize(("advantage", "of_rewards"), [("none", (0.0, 0.0)), ("dr_grpo", (0.5, -0.5))])
def test_the_policy_gradient_form_is_an_advantage_per_token(advantage: str, of_rewards: tuple[float, float]) -> None:
    """log π_b − log π_T: a −0.5 + 2 = 1.5, −1 + 0.5 = −0.5, observed 0; b −0.5 + 0.7 = 0.2.  Advantages fall by half of it.

    Over the two tokens that are trained the mean gap is (−0.5 + 0.2) / 2.
    """
    gap = gaps([TAUGHT], [[-2.0, -0.5, -9.0], [-0.7]])
    assert gap["a"] == pytest.approx((1.5, -0.5, 0.0)) and gap["b"] == pytest.approx((0.2,))
    taught = recipe(distill={**TEACHER, "form": "policy_gradient"}, advantage=advantage)
    made = assembled([TAUGHT], NOW, taught, gap_of_sample=gap)
    samples, (a, b) = by_name(made.batch), of_rewards
    assert samples["a"].advantages == pytest.approx((a - 0.75, a + 0.25, a)) and samples["b"].advantages == pytest.approx(
        (b - 0.1,)
    )
    assert samples["a"].rl == (0.0, 1.0, 0.0) and made.batch.rl_denominators == (2.0,)
    assert samples["a"].distill == (0.0,) * 3 and made.batch.distill_denominators == (0.0,)
    assert values(made.metrics)["distill/kl"] == pytest.approx(-0.15)


def test_demonstrations_are_cross_entropy_on_the_completion() -> None:
    batch = assemble_demonstrations([("a", (5, 6), (7, 2)), ("b", (5,), (8, 9, 2)), ("c", (5,), (2,))], NOW, minibatches=2)
    first, second = batch.minibatches
    assert [s.sample_id for s in first] == ["a", "b"] and [s.sample_id for s in second] == ["c"]
    assert batch.ce_denominators == (5.0, 1.0) and batch.rl_denominators == batch.distill_denominators == (0.0, 0.0)
    assert first[0].input_ids == (5, 6, 7, 2) and first[0].prompt_length == 2
    assert first[0].ce == (1.0, 1.0) and first[0].rl == (0.0, 0.0)
    assert len(assemble_demonstrations([("a", (5,), (2,))], NOW, minibatches=3).minibatches) == 1, "no empty mini-batch"


def test_samples_for_the_reference_are_whole() -> None:
    (sample,) = samples_of([group("g", response("a", 1.0, 1, 3))])
    assert sample.input_ids == (5, 6, 47, 4, 5) and sample.rl == (0.0, 0.0)


def test_an_empty_response_is_not_scored_and_has_no_gaps() -> None:
    """A row cannot hold it: nothing of it is predicted."""
    groups = [group("g", response("a", 1.0, 1, 3), empty := replace(response("b", 0.5, 1), **EMPTY), response("c", 0.0, 3))]
    samples = samples_of(groups)
    assert [sample.sample_id for sample in samples] == ["a", "c"]
    assert pack(samples).lengths == (2, 1)
    assert empty.token_ids == () and gaps(groups, [[-1.0, -1.0], [-1.0]]) == {"a": (0.5, 0.0), "b": (), "c": (0.5,)}
    made = assembled(
        groups,
        NOW,
        recipe(kl={"coefficient": 0.2, "placement": "reward", "estimator": "k1"}),
        Penalty(0.2, gaps(groups, [[-1.0, -1.0], [-1.0]])),
    )
    assert [record["outcome"] for record in made.records] == ["trained", "stale", "trained"]
    assert [record["reward"] for record in made.records] == pytest.approx([0.9, 0.5, -0.1])


def test_a_record_has_runs() -> None:
    trajectory = response("g#0", 1.0, 1, 1, 2, 3, observed=(0,))
    record = sample_record(group("g", trajectory), trajectory, 0.25, (0.0, 0.0, 1.0, 1.0), NOW, "trained")
    assert record == {
        "batch": 4,
        "assembled_at": "0.3",
        "sample_id": "g#0",
        "group_id": "g",
        "prompt": "12<",
        "prompt_ids": [5, 6, 47],
        "token_ids": [4, 5, 6, 7],
        "text": "xxxx",
        "loss_mask": [[0, 0, 1], [1, 1, 4]],
        "versions": [["0.1", 0, 2], ["0.2", 2, 3], ["0.3", 3, 4]],
        "kv_versions": [["0.1", 0, 4]],
        "weights": [[0.0, 0, 2], [1.0, 2, 4]],
        "behaviour_logprobs": [-0.5, -1.0, -1.5, -2.0],
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "advantage": 0.25,
        "status": "eos",
        "draft": {"rounds": 0, "drafted": 0, "accepted": 0},
        "outcome": "trained",
    }


def metrics_of(groups: list[Group], schedule: Schedule) -> dict[str, Any]:
    masks = {t.sample_id: loss_mask(t, NOW, schedule) for g in groups for t in g.trajectories}
    return values(staleness_metrics(groups, masks, NOW, schedule))


def test_the_tokens_of_a_response_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    fresh = staleness.fresh

    def counted(trajectory: Trajectory, *arguments: Any) -> Any:
        judged.append(trajectory.sample_id)
        return fresh(trajectory, *arguments)

    monkeypatch.setattr(staleness, "fresh", counted)
    assembled([group("g", response("a", 1.0, 1, 2, 3), response("b", 0.0, 1, 1))], NOW, recipe())
    assert judged == ["a", "b"]


def test_staleness_metrics_count_the_tokens_that_the_policy_wrote() -> None:
    """Learner at 3, bound 1.  Lags: a 2, 1, 0, 0 (KV lag 2 each), b 1 (its first token, of lag 3, was observed; KV lag 3)."""
    groups = [group("g", response("a", 1.0, 1, 2, 3, 3), response("b", 0.0, 0, 2, observed=(0,)))]
    metrics = metrics_of(groups, Schedule(max_staleness=1))
    expected = {
        "staleness/token_mean": 4 / 5,
        "staleness/token_max": 2,
        "staleness/trained_token_max": 1,
        "staleness/token_hist": {"0": 2, "1": 2, "2": 1},
        "staleness/sample_oldest_max": 3,
        "staleness/kv_mean": (2 * 4 + 3) / 5,
        "staleness/kv_max": 3,
        "staleness/kv_masked_frac": 0.0,
        "staleness/versions_per_sample": 2.5,  # three versions in a, two in b
        "staleness/versions_per_sample_max": 3,
        "staleness/masked_frac": 1 / 5,
        "staleness/masked_frac_q1": 1.0,  # only the first token of a lies in the first quarter of its response
        "staleness/masked_frac_q2": 0.0,
        "staleness/masked_frac_q3": 0.0,
        "staleness/masked_frac_q4": 0.0,
    }
    for name, value in expected.items():
        assert metrics[name] == (value if isinstance(value, dict) else pytest.approx(value)), name
    assert set(metrics) == set(expected)


def test_lags_are_stamped_across_attempts() -> None:
    """Learner at 1.3, resumed: a token of 0.1 lags by two committed batches, one of 1.3 by none."""
    resumed = replace(
        response("a", 1.0, 1, 2, 3), policy_versions=(WeightVersion(0, 1), WeightVersion(0, 2), WeightVersion(1, 3))
    )
    made = assembled([group("g", resumed, response("b", 0.0, 3))], WeightVersion(1, 3), recipe(bound=2))
    assert by_name(made.batch)["a"].lag == (2, 1, 0)


def test_weights_fall_with_the_lag_up_to_the_bound() -> None:
    """lag_decay 1/2, bound 1: lags 2, 1, 0 weigh 0 (stale), 1/2, 1; the denominator counts the two fresh tokens and b's."""
    decaying = recipe(schedule={"lag_decay": 0.5})
    made = assembled([group("g", response("a", 1.0, 1, 2, 3), response("b", 0.0, 3))], NOW, decaying)
    assert by_name(made.batch)["a"].rl == (0.0, 0.5, 1.0) and made.batch.rl_denominators == (3.0,)


def test_weights_that_are_nothing_in_float32_make_no_step() -> None:
    """0.01^20 = 1e-40 for every token: below float32's normal numbers, and Adam's momentum would step on alone."""
    decaying = recipe(bound=20, schedule={"lag_decay": 0.01})
    made = assembled([group("g", response("a", 1.0, 1), response("b", 0.0, 1))], WeightVersion(0, 21), decaying)
    assert by_name(made.batch)["a"].rl == (0.0,) and made.batch.rl_denominators == (0.0,)


OLD_CACHE = [
    group("g", response("a", 1.0, 1, 2, 3), response("b", 0.0, 2, 3), response("c", 0.0, 3)),
    group("h", response("d", 0.0, 0, 3), response("e", 1.0, 3)),
]
"""Learner at 3, bound 1.  Every token attended to the entries of its response's first one: KV lags a 2, b 1, c 0, d 3, e 0."""


def test_tokens_that_attended_to_old_kv_entries_weigh_nothing() -> None:
    """max_kv_lag 2: a keeps its two fresh tokens, d has none any more.  Denominator: a 2, b 2, c 1, e 1."""
    made = assembled(OLD_CACHE, NOW, recipe(schedule={"max_kv_lag": 2}))
    samples = by_name(made.batch)
    assert samples["a"].rl == (0.0, 1.0, 1.0) and set(samples) == {"a", "b", "c", "e"}
    assert made.batch.rl_denominators == (6.0,)
    assert {record["sample_id"]: record["outcome"] for record in made.records}["d"] == "stale"
    tighter = assembled(OLD_CACHE, NOW, recipe(schedule={"max_kv_lag": 1}))
    assert set(by_name(tighter.batch)) == {"b", "c", "e"} and tighter.batch.rl_denominators == (4.0,)
    assert samples["a"].advantages == pytest.approx([2 / 3] * 3), "every sibling counts in the statistics"


def test_weights_fall_with_the_lag_of_the_kv_entries() -> None:
    """1/2 per version of lag, 1/4 per version of KV lag: a's fresh tokens of lags 1 and 0 and KV lag 2 weigh 1/32 and 1/16;
    d's last token 1/64.  The denominator counts them all alike: a 2, b 2, c 1, d 1, e 1."""
    made = assembled(OLD_CACHE, NOW, recipe(schedule={"lag_decay": 0.5, "kv_lag_decay": 0.25}))
    samples = by_name(made.batch)
    assert samples["a"].rl == (0.0, 1 / 32, 1 / 16) and samples["b"].rl == (1 / 8, 1 / 4)
    assert samples["d"].rl == (0.0, 1 / 64) and made.batch.rl_denominators == (7.0,)


def test_metrics_tell_what_old_kv_entries_mask() -> None:
    """Nine tokens.  Beyond the bound: the first of a and of d.  Beyond max_kv_lag 1 alone: two of a and one of d.

    KV lags: 3 × 2 + 2 × 1 + 0 + 2 × 3 + 0 = 14.  What is left has lags 1 and 0 (b), 0 (c), 0 (e).
    """
    metrics = metrics_of(OLD_CACHE, Schedule(max_staleness=1, max_kv_lag=1))
    assert metrics["staleness/masked_frac"] == pytest.approx(5 / 9)
    assert metrics["staleness/kv_masked_frac"] == pytest.approx(3 / 9)
    assert metrics["staleness/kv_mean"] == pytest.approx(14 / 9) and metrics["staleness/kv_max"] == 3
    assert metrics["staleness/token_max"] == 3 and metrics["staleness/trained_token_max"] == 1


@pytest.mark.parametrize(
    ("written", "reward"),  # soft 1/2 of 4 tokens: 0 up to two, then -1/2 and -1
    [(1, 0.0), (2, 0.0), (3, -0.5), (4, -1.0)],
)
def test_the_soft_overlong_punishment(written: int, reward: float) -> None:
    assert overlong_reward(response("a", 1.0, *[3] * written), 4, 0.5) == pytest.approx(reward)


def test_a_context_shorter_than_all_turns_is_the_limit_of_a_response() -> None:
    """8 turns of 4 tokens do not fit into a context of 4, and no response gets further: there the punishment is whole.

    The denominator of ``constant`` follows: 2 responses of 4 tokens.
    """
    turns = recipe(overlong={"soft": 0.5}, reduction="constant")
    environment = turns.rollout.environment.model_copy(update={"name": "calculator"})
    turns = turns.model_copy(update={"rollout": turns.rollout.model_copy(update={"environment": environment})})
    groups = [group("g", response("a", 1.0, 3, 3, 3, 3), response("b", 1.0, 3))]
    made = assembled(groups, NOW, turns, context=4)
    assert [record["reward"] for record in made.records] == [0.0, 1.0]
    assert made.batch.rl_denominators == (8.0,)
    assert [record["reward"] for record in assembled(groups, NOW, turns).records] == [1.0, 1.0], "of 32"


def test_overlong_responses_count_in_the_statistics_and_train_nothing() -> None:
    """c was cut off after 4 of 4 tokens: reward 1 − 1 = 0, mean (1 + 0 + 0) / 3 = 1/3, advantages 2/3, −1/3; no weight for c.

    d is stale throughout, so it is stale, whether or not it was cut off.
    """
    cut = replace(response("c", 1.0, 3, 3, 3, 3), status="length")
    stale = replace(response("d", 0.0, 0, 0), status="length")
    groups = [group("g", response("a", 1.0, 3, 3), response("b", 0.0, 3), cut), group("h", response("e", 1.0, 3), stale)]
    made = assembled(groups, NOW, recipe(overlong={"filter": True, "soft": 0.5}))
    samples = by_name(made.batch)
    assert set(samples) == {"a", "b", "e"} and made.batch.rl_denominators == (4.0,)
    assert samples["a"].advantages == pytest.approx([2 / 3] * 2) and samples["b"].advantages == pytest.approx([-1 / 3])
    outcomes = {record["sample_id"]: record["outcome"] for record in made.records}
    assert outcomes == {"a": "trained", "b": "trained", "c": "filtered", "e": "trained", "d": "stale"}
    (record,) = (r for r in made.records if r["sample_id"] == "c")
    assert record["reward"] == 0.0 and record["rewards"] == {"exact": 1.0, "overlong": -1.0}
    assert values(made.metrics)["reward/overlong"] == pytest.approx(-1 / 5)


def test_an_adaptive_coefficient_waits_until_the_policy_moves() -> None:
    """While the critic warms up the policy is the reference, and a KL of 0 would take the coefficient down."""
    kl = {"coefficient": 0.1, "target": 1.0, "horizon": 10_000, "placement": "reward", "estimator": "k1"}
    scoring = Scoring(recipe(name="ppo", critic={"warmup_batches": 2}, kl=kl), None, None)  # type: ignore[arg-type]
    nothing = Penalty(0.1, {"a": (0.0, 0.0)})
    scoring.charged(nothing, 2)
    assert scoring.coefficient == 0.1
    scoring.charged(nothing, 3)
    assert scoring.coefficient < 0.1
