"""Distillation through the objective, on a chain of three tokens of three kinds: expectations by enumeration, from π_b.

Student, sampler and teacher are tables of logits, one row per prefix, so the gradient's row at a prefix is what the estimator
does with the next-token distribution there.  KL_p is KL(π ‖ π_T) at prefix p.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.algorithms import Algo, Correction
from slipstream.trainer.objective import SUMS, Contribution, Objective, step_metrics
from slipstream.trainer.offpolicy import Anchors
from slipstream.trainer.packing import PackedRow

LENGTH, VOCABULARY = 3, 3
TEMPERATURE, COEFFICIENT, DENOMINATOR = 0.7, 0.3, 2.0
SEQUENCES = list(product(range(VOCABULARY), repeat=LENGTH))
PREFIXES = [prefix for n in range(LENGTH) for prefix in product(range(VOCABULARY), repeat=n)]
GENERATOR = torch.Generator().manual_seed(2)


def table() -> Tensor:
    return torch.randn(len(PREFIXES), VOCABULARY, generator=GENERATOR, dtype=torch.float64)


STUDENT, TEACHER = table(), table()
SAMPLER = STUDENT + 0.5 * table()


def rows_of(sequence: tuple[int, ...]) -> list[int]:
    return [PREFIXES.index(sequence[:t]) for t in range(LENGTH)]


def token_logprobs(logits_PV: Tensor, sequence: tuple[int, ...]) -> Tensor:
    log_softmax_PV = (logits_PV.detach() / TEMPERATURE).log_softmax(-1)
    return log_softmax_PV[rows_of(sequence), list(sequence)]


def row_of(sequence: tuple[int, ...], behaviour_T: Tensor, **streams: Tensor) -> PackedRow:
    zeros = torch.zeros(LENGTH, dtype=torch.float64)
    given: dict[str, Any] = {"rl_N": zeros, "distill_N": zeros, "advantages_N": zeros, **streams}
    return PackedRow(
        input_ids_T=torch.tensor([0, *sequence]),
        position_ids_T=torch.arange(LENGTH + 1),
        predicting_N=torch.arange(LENGTH),
        targets_N=torch.tensor(sequence),
        ce_N=zeros,
        behaviour_N=behaviour_T,
        lag_N=zeros,
        rewards_N=zeros,
        action_N=zeros.bool(),
        sequence_N=torch.zeros(LENGTH, dtype=torch.int64),
        lengths=(LENGTH,),
        **given,
    )


def objective(level: str = "token", cap: float | None = None) -> Objective:
    correction = Correction(weight=level, cap=cap)  # type: ignore[arg-type]
    return Objective(Algo(correction=correction, clip_low=0.999, clip_high=1e6), TEMPERATURE, COEFFICIENT)


def of_row(judge: Objective, logits_NV: Tensor, teacher_NV: Tensor | None, row: PackedRow) -> Contribution:
    return judge(
        logits_NV,
        row,
        Anchors(rl_N=row.rl_N),
        rl_denominator=DENOMINATOR if row.rl_N.any() else 0.0,
        ce_denominator=0.0,
        distill_denominator=DENOMINATOR if row.distill_N.any() else 0.0,
        progress=0.0,
        teacher_NV=teacher_NV,
    )


def expected_gradient(judge: Objective, sampler_PV: Tensor, form: str, student_PV: Tensor = STUDENT) -> Tensor:
    """[P, V]: E over y ~ π_b of the gradient of the objective's loss."""
    logits_PV = student_PV.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    ones = torch.ones(LENGTH, dtype=torch.float64)
    for y in SEQUENCES:
        behaviour_T = token_logprobs(sampler_PV, y)
        if form == "full":
            row, teacher_NV = row_of(y, behaviour_T, distill_N=ones), TEACHER[rows_of(y)]
        else:
            advantages_T = -COEFFICIENT * (behaviour_T - token_logprobs(TEACHER, y))
            row, teacher_NV = row_of(y, behaviour_T, rl_N=ones, advantages_N=advantages_T), None
        total = total + behaviour_T.sum().exp() * of_row(judge, logits_PV[rows_of(y)], teacher_NV, row).loss
    return torch.autograd.grad(total, logits_PV)[0]


def kl_gradient(other_PV: Tensor = TEACHER) -> Tensor:
    """[P, V]: ∇KL_p, by the chain rule of torch on its definition."""
    logits_PV = STUDENT.clone().requires_grad_()
    ours_PV, theirs_PV = (logits_PV / TEMPERATURE).log_softmax(-1), (other_PV / TEMPERATURE).log_softmax(-1)
    return torch.autograd.grad((ours_PV.exp() * (ours_PV - theirs_PV)).sum(), logits_PV)[0]


def visits(logits_PV: Tensor) -> Tensor:
    """[P, 1]: how probable it is that a response begins with each prefix."""
    log_softmax_PV = (logits_PV / TEMPERATURE).log_softmax(-1)
    steps = [sum(log_softmax_PV[PREFIXES.index(p[:t]), p[t]] for t in range(len(p))) for p in PREFIXES]
    return torch.stack([torch.as_tensor(s, dtype=torch.float64).exp() for s in steps]).unsqueeze(-1)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def far(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() > 0.03 * expected.norm())


SHARE = COEFFICIENT / DENOMINATOR


@pytest.mark.parametrize("level", ["none", "token", "sequence", "geometric"])
@pytest.mark.parametrize("form", ["full", "policy_gradient"])
def test_on_policy_both_forms_are_the_gradient_of_kl_at_every_prefix(form: str, level: str) -> None:
    """No token answers for what the tokens after it do: discount 0."""
    close(expected_gradient(objective(level, 2.0), STUDENT, form), SHARE * visits(STUDENT) * kl_gradient())


@pytest.mark.parametrize("level", ["none", "token"])
def test_off_policy_the_full_form_is_right_at_the_prefixes_of_the_sampler(level: str) -> None:
    """A token's own ratio is 1 on average, and its KL does not depend on the token: the weight changes the variance only."""
    found = expected_gradient(objective(level), SAMPLER, "full")
    close(found, SHARE * visits(SAMPLER) * kl_gradient())
    assert far(found, SHARE * visits(STUDENT) * kl_gradient())


def test_off_policy_the_sequence_weight_brings_the_full_form_to_the_prefixes_of_the_policy() -> None:
    close(expected_gradient(objective("sequence"), SAMPLER, "full"), SHARE * visits(STUDENT) * kl_gradient())


def test_truncation_of_the_token_weight_shrinks_the_full_form() -> None:
    """By Σ_v min(π, 1.1 π_b) at each prefix, the documented bias: the direction at a prefix stays."""
    ours_PV, theirs_PV = ((x / TEMPERATURE).softmax(-1) for x in (STUDENT, SAMPLER))
    shrunk_P1 = torch.minimum(ours_PV, 1.1 * theirs_PV).sum(-1, keepdim=True)
    assert shrunk_P1.min() < 0.95
    found = expected_gradient(objective("token", 1.1), SAMPLER, "full")
    close(found, SHARE * shrunk_P1 * visits(SAMPLER) * kl_gradient())


def test_off_policy_the_policy_gradient_measures_from_the_sampler() -> None:
    """E_π_b[r (log π_T − log π_b) ∇log π] = −∇KL(π ‖ π_T) + ∇KL(π ‖ π_b), as for a KL penalty in the reward."""
    found = expected_gradient(objective("token"), SAMPLER, "policy_gradient")
    close(found, SHARE * visits(SAMPLER) * (kl_gradient() - kl_gradient(SAMPLER)))


@pytest.mark.parametrize("form", ["full", "policy_gradient"])
def test_a_teacher_that_is_the_student_has_nothing_to_teach(form: str) -> None:
    assert expected_gradient(objective(), TEACHER, form, student_PV=TEACHER).abs().max() < 1e-15


def test_values_and_metrics_by_hand() -> None:
    """Two of three tokens count, with weights 1 and 1/2 and KL_t ≠; π_b = π / 2 there, so r = 2, truncated to 1.5.

    loss = 0.3 · (1 · 1.5 · KL_0 + 0.5 · 1.5 · KL_2) / 2; the third token's π_b of 0 must not matter.
    """
    y = (1, 2, 0)
    behaviour_T = token_logprobs(STUDENT, y) - torch.tensor(2.0, dtype=torch.float64).log()
    behaviour_T[1] = -torch.inf
    row = row_of(y, behaviour_T, distill_N=torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64))
    found = of_row(objective("token", 1.5), STUDENT[rows_of(y)].requires_grad_(), TEACHER[rows_of(y)], row)
    ours, theirs = ((x[rows_of(y)] / TEMPERATURE).log_softmax(-1) for x in (STUDENT, TEACHER))
    kl_T = (ours.exp() * (ours - theirs)).sum(-1)
    expected = 0.3 * 1.5 * (kl_T[0] + 0.5 * kl_T[2]) / 2
    torch.testing.assert_close(found.loss.double(), expected, rtol=1e-12, atol=0)
    sums = {name: float(found.sums[name]) for name in SUMS}
    metrics = step_metrics(sums, with_kl=False)
    assert set(metrics) == {"loss/distill", "distill/kl", "loss/entropy"}
    assert metrics["loss/distill"].value() == pytest.approx(float(expected))
    assert metrics["distill/kl"].value() == pytest.approx(float(kl_T[0] + kl_T[2]) / 2)
    assert (sums["written_tokens"], sums["distill_tokens"], sums["rl_tokens"]) == (2, 2, 0)
    assert sums["ratio"] == pytest.approx(4.0) and sums["truncated"] == pytest.approx(3.0) and float(found.ratio_max) > 1.99


def test_beside_a_policy_loss_the_two_add_up_and_what_is_measured_is_the_rl_streams() -> None:
    first = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    ones, advantages_T = torch.ones(LENGTH, dtype=torch.float64), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    y, judge = (0, 1, 1), objective()
    behaviour_T, logits_NV, teacher_NV = token_logprobs(SAMPLER, y), STUDENT[rows_of(y)], TEACHER[rows_of(y)]
    streams = {"rl_N": ones, "advantages_N": advantages_T}
    alone = [
        of_row(judge, logits_NV, teacher_NV, row_of(y, behaviour_T, **chosen)) for chosen in (streams, {"distill_N": first})
    ]
    both = of_row(judge, logits_NV, teacher_NV, row_of(y, behaviour_T, distill_N=first, **streams))
    close(both.loss, alone[0].loss + alone[1].loss)
    assert (both.sums["written_tokens"], both.sums["distill_tokens"]) == (3, 1) and alone[1].sums["written_tokens"] == 1
    assert both.sums["ratio"] == alone[0].sums["ratio"] and both.ratio_max == alone[0].ratio_max


def test_the_gradient_against_finite_differences() -> None:
    """The behaviour weight is frozen at 2, its cap, by a sampler that was a fifth as sure; the other stream is off."""
    y = (2, 0, 1)
    behaviour_T = token_logprobs(STUDENT, y) - torch.tensor(5.0, dtype=torch.float64).log()
    row = row_of(y, behaviour_T, distill_N=torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64))
    judge = objective("token", 2.0)
    assert torch.autograd.gradcheck(
        lambda logits_NV: of_row(judge, logits_NV, TEACHER[rows_of(y)], row).loss, STUDENT[rows_of(y)].requires_grad_()
    )
