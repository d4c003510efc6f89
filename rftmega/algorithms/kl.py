"""Estimators of KL(policy || reference) from samples of the policy (Schulman, "Approximating KL
divergence", 2020).

Each takes the log-ratio delta = logp - reference_logp of the sampled tokens, any shape, and is
elementwise. Gradients with respect to logp: k1: 1 (zero-mean, so k1 makes no sense as a loss), k2:
delta, k3: 1 - exp(-delta). The gradient of the KL is the mean of delta x the gradient of logp, so
that k3 as a loss is biased; `UNBIASED`, k3 times the ratio of the current to the old policy, is not
(arXiv:2512.02556, section 3.1).
"""

from collections.abc import Callable

import torch
from torch import Tensor


def k1(delta: Tensor) -> Tensor:
    """Returns the log-ratio `delta` = logp - reference_logp itself, an estimate of the KL that is
    unbiased and may be negative.
    """
    return delta


def k2(delta: Tensor) -> Tensor:
    """Returns delta^2 / 2 for `delta` = logp - reference_logp, an estimate of the KL that is biased
    and has low variance.

    The gradient of this estimate is an unbiased estimate of the KL's gradient.
    """
    return delta.square() / 2


def k3(delta: Tensor) -> Tensor:
    """Returns exp(-delta) - 1 + delta for `delta` = logp - reference_logp, an estimate of the KL
    that is unbiased and never negative (GRPO, arXiv:2402.03300, eq. 4).
    """
    return torch.expm1(-delta) + delta


UNBIASED = "unbiased"
ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, UNBIASED: k3}


class KLController:
    """KLController holds the KL coefficient, `value`, which is constant without a `target` (KL per
    token).

    With a target the coefficient follows the observed KL (arXiv:1909.08593, section 2.2): it rises
    if the KL is above the target and falls if the KL is below. One rollout phase changes it by at
    most 20 % x completions / `horizon`. `value` is the controller's whole state.
    """

    def __init__(self, value: float, *, target: float = 0.0, horizon: int = 10_000):
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, seen: float, completions: int) -> None:
        """Updates the coefficient after a rollout phase; `completions`: number of completions in
        the phase; `seen`: their mean KL per token.
        """
        if self.target:
            error = min(max(seen / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * min(completions / self.horizon, 1.0)
