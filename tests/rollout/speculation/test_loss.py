"""The loss of an update, by hand."""

import math

import pytest
import torch

from slipstream.rollout.speculation.loss import draft_loss, position_weights


def test_loss_by_hand() -> None:
    """Two rows over two tokens, weights 1 and e^-1 (k = 1, 2 and a decay of 1).

    Row 1: p = (1/2, 1/2), q' = (1/4, 3/4), q = (1/4, 3/4): KL(p‖q') = ln 2 / 2 + ln(2/3) / 2 = 0.1438410, KL(q‖q') = 0.
    Row 2: p = q' = (1/2, 1/2), q = (1/4, 3/4): KL(p‖q') = 0, KL(q‖q') = ln(1/2) / 4 + 3 ln(3/2) / 4 = 0.1308120.
    With λ = 2: (0.1438410 + e^-1 · 2 · 0.1308120) / (1 + e^-1) = (0.1438410 + 0.0962464) / 1.3678794 = 0.1755182.
    The gradient of row 1 is w (q' − p) = (−1/4, 1/4) / 1.3678794; of row 2, λ w (q' − q) = 2 e^-1 (1/4, −1/4) / 1.3678794.
    """
    one, other = [0.0, math.log(3)], [0.0, 0.0]
    now = torch.tensor([one, other], requires_grad=True)
    weights = position_weights(torch.tensor([1, 2]), 1.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.3678794]))
    loss = draft_loss(now, torch.tensor([other, other]), torch.tensor([one, one]), weights, 2.0)
    torch.testing.assert_close(loss, torch.tensor(0.1755182))
    loss.backward()
    torch.testing.assert_close(now.grad, torch.tensor([[-0.1827646, 0.1827646], [0.1344706, -0.1344706]]))
    assert draft_loss(now, torch.tensor([other, other]), None, weights, 0.0).item() == pytest.approx(0.1438410 / 1.3678794)


def test_the_proximal_term_has_no_gradient_at_the_draft_that_proposed() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    target = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    gradients = []
    for proximal in (0.0, 5.0):
        now = logits.clone().requires_grad_()
        draft_loss(now, target, logits.clone(), torch.ones(3), proximal).backward()
        gradients.append(now.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
