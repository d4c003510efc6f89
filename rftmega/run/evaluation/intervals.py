"""Means over prompts with 95 % confidence intervals.

Completions of one prompt are not independent, so the sampling unit is the prompt: an interval is
computed from one value per prompt (clustered standard error).
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

Z = NormalDist().inv_cdf(0.975)


class Estimate(NamedTuple):
    """Estimate is a mean over prompts with the ends of its 95 % confidence interval, which are None
    for a single prompt with a value other than 0 and 1.
    """

    mean: float
    low: float | None
    high: float | None
    prompts: int


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of one value per prompt with its confidence interval. If all values are 0 or
    1 (one completion per prompt, or prompts that are alike), it is Wilson's score interval
    (doi:10.1080/01621459.1927.10502953), otherwise mean +- 1.96 s / sqrt(prompts), where s is the
    sample standard deviation of the values.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("There is no mean of no values.")
    n = len(values)
    mean = math.fsum(values) / n
    if all(value in (0, 1) for value in values):
        return Estimate(mean, *wilson(round(mean * n), n), n)
    if n == 1:
        return Estimate(mean, None, None, n)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = Z * math.sqrt(variance / n)
    return Estimate(mean, mean - half, mean + half, n)


def share(values: Sequence[float]) -> Estimate:
    """Returns the `estimate` of values from 0 to 1, with its interval cut to this range."""
    found = estimate(values)
    if found.low is None or found.high is None:
        return found
    return found._replace(low=max(found.low, 0.0), high=min(found.high, 1.0))


def wilson(right: int, trials: int) -> tuple[float, float]:
    """Returns the ends of Wilson's 95 % score interval of a share of `right` of `trials`."""
    mean = right / trials
    scale = 1 + Z**2 / trials
    middle = (mean + Z**2 / (2 * trials)) / scale
    half = Z * math.sqrt(mean * (1 - mean) / trials + Z**2 / (4 * trials**2)) / scale
    low = 0.0 if right == 0 else middle - half
    high = 1.0 if right == trials else middle + half
    return low, high
