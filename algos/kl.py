"""Estimators of KL(π ‖ π_ref) from the log-probabilities of the sampled tokens, and their gradients.

With x = log π(y) − log π_ref(y) and y ~ π: k1 = x, k2 = x²/2, k3 = e^(−x) − 1 + x (Schulman 2020, "Approximating KL
divergence").  Values and gradients are different matters (Tang & Munos 2025, arXiv 2506.09477):

====================================  =====================================
use                                   expected gradient
====================================  =====================================
k1 differentiated                     0
k2 differentiated                     ∇KL(π ‖ π_ref)
k3 differentiated                     ∇KL(π_ref ‖ π), the other direction
value of k3 with the gradient of k2   ∇KL(π ‖ π_ref)
k1 in the reward                      ∇KL(π ‖ π_ref)
====================================  =====================================
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

MIN_LOG_RATIO = -20.0
"""Where e^(−x) of k3 stops growing, at 4.9e8: one absurd token must not turn the mean of a metric into infinity."""


def kl_value(
    logprobs_T: Float[Tensor, " T"], reference_T: Float[Tensor, " T"], estimator: Literal["k1", "k2", "k3"]
) -> Float[Tensor, " T"]:
    """Estimate of KL(π ‖ π_ref) per token, in nats: a metric, or (k1) a part of the reward.

    Never negative for k2 and k3.  Not for the loss: differentiating it gives the gradients of the table above.
    Raises ValueError for an unknown estimator.
    """
    x_T = logprobs_T - reference_T
    if estimator == "k1":
        return x_T
    if estimator == "k2":
        return x_T.square() / 2
    if estimator == "k3":
        bounded_T = x_T.clamp(min=MIN_LOG_RATIO)
        return (-bounded_T).expm1() + bounded_T
    raise ValueError(f"estimator of the KL: got {estimator!r}, expected 'k1', 'k2' or 'k3'")


def kl_loss(
    logprobs_T: Float[Tensor, " T"], reference_T: Float[Tensor, " T"], estimator: Literal["k2", "k3"]
) -> Float[Tensor, " T"]:
    """The estimate of ``kl_value`` per token, with the gradient of KL(π ‖ π_ref): x · ∇log π, for both estimators.

    k3's lower variance is in its value only; its gradient is taken straight through from k2.  Exact in expectation for
    tokens sampled from π; ``reference_T`` gets no gradient.
    Raises ValueError for k1, whose expected gradient is zero, and for an unknown estimator.
    """
    if estimator not in ("k2", "k3"):
        raise ValueError(
            f"estimator of the KL in the loss: got {estimator!r}, expected 'k2' or 'k3'; "
            "k1 has zero expected gradient there: put k1 in the reward instead"
        )
    k2_T = kl_value(logprobs_T, reference_T.detach(), "k2")
    if estimator == "k2":
        return k2_T
    value_T = kl_value(logprobs_T.detach(), reference_T.detach(), "k3")
    return value_T + (k2_T - k2_T.detach())


def adapted_coefficient(coefficient: float, observed: float, *, target: float, horizon: int, samples: int) -> float:
    """The coefficient of the KL in the reward after a batch of ``samples`` responses of mean KL ``observed``, in nats.

    β (1 + clip(observed / target − 1, −0.2, 0.2) · samples / horizon): Ziegler et al. 2019, arXiv 1909.08593, section 2.2, with
    their K_β per update written per response.  Target 5, horizon 1000, 100 responses: 0.1 becomes 0.102 where 10 nats were
    observed, and 0.098 where 0 were.
    """
    error = min(max(observed / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * samples / horizon)
