"""Estimators of KL(policy || reference) from samples of the policy (Schulman, "Approximating KL divergence", 2020).

Each takes the log-ratio delta = logp - reference_logp of the sampled tokens, any shape, and is elementwise. Gradients with
respect to logp: k1: 1 (zero-mean, so k1 makes no sense as a loss), k2: delta, k3: 1 - exp(-delta).
"""

from collections.abc import Callable

import torch
from torch import Tensor


def k1(delta: Tensor) -> Tensor:
    """Unbiased, may be negative."""
    return delta


def k2(delta: Tensor) -> Tensor:
    """Biased, low variance; its gradient is that of the KL itself."""
    return delta.square() / 2


def k3(delta: Tensor) -> Tensor:
    """Unbiased and never negative (GRPO, arXiv:2402.03300, eq. 4)."""
    return torch.expm1(-delta) + delta


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
