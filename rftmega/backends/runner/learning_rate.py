"""Computes the learning rate of each optimizer step as a pure function of the step's number."""

import math

from rftmega.config import OptimizerConfig


def learning_rate(chosen: OptimizerConfig, step: int, *, steps: int) -> float:
    """Returns the learning rate of optimizer step `step` (counted from 1) of a run with `steps`
    optimizer steps and the options `chosen`.

    It rises linearly over `warmup_steps`. Then it stays constant, or falls to `min_learning_rate`
    linearly or along half a cosine (Loshchilov and Hutter, arXiv:1608.03983, without restarts). The
    step after the last one would reach the minimum.
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
