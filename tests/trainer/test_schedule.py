"""Learning-rate schedules, as literal numbers."""

from __future__ import annotations

import pytest

from slipstream.core.schema import Optimizer
from slipstream.trainer.optim import learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # lr 8, two warm-up steps (4, 8), then steps 2 to 6 are 0, 1/4, 1/2, 3/4, 1 of the way from 8 down to 0.25 · 8 = 2
        ("constant", [4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]),
        ("linear", [4.0, 8.0, 8.0, 6.5, 5.0, 3.5, 2.0]),
        # 2 + 6 · (1 + cos(π · done)) / 2, with cos(π/4) = 0.70710678
        ("cosine", [4.0, 8.0, 8.0, 7.12132034, 5.0, 2.87867966, 2.0]),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    optimizer = Optimizer(lr=8.0, warmup_steps=2, min_lr_ratio=0.25, schedule=schedule)  # type: ignore[arg-type]
    assert [learning_rate(optimizer, step, 7) for step in range(7)] == pytest.approx(expected)
    assert learning_rate(optimizer, 50, 7) == pytest.approx(expected[-1]), "it stays where the schedule ends"


def test_a_phase_of_one_step_and_a_warm_up_longer_than_the_phase() -> None:
    assert learning_rate(Optimizer(lr=3.0, schedule="cosine"), 0, 1) == 3.0
    assert [learning_rate(Optimizer(lr=4.0, warmup_steps=4, schedule="linear"), step, 2) for step in range(2)] == [1.0, 2.0]
