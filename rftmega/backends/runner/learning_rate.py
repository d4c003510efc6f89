"""Computes the learning rate of each optimizer step as a pure function of its number."""

import math

from rftmega.config import OptimizerConfig


def learning_rate(chosen: OptimizerConfig, step: int, *, steps: int) -> float:
    """Returns the learning rate of optimizer step `step`, counted from 1, of `steps` in all.

    It rises linearly over `warmup_steps`. Then it stays constant, or falls to `min_learning_rate`
    linearly or along half a cosine (Loshchilov and Hutter, arXiv:1608.03983, without restarts). The
    minimum is reached by the step that would follow the last.
    """
    peak, least = chosen.learning_rate, chosen.min_learning_rate
    warm, end = chosen.warmup_steps, steps + 1
    if warm and step <= warm:
        return peak * step / warm
    if chosen.schedule == "constant":
        return peak
    if step > end:
        return least
    done = (step - warm) / (end - warm)
    left = 1 - done if chosen.schedule == "linear" else (math.cos(math.pi * done) + 1) / 2
    return least + left * (peak - least)
