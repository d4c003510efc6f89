"""Mixing of experiences."""

from collections.abc import Sequence

import torch

from rftmega.core.ragged import Ragged
from rftmega.core.types import Experience


def mixed_evenly(parts: Sequence[Experience[Ragged]]) -> Experience[Ragged]:
    """Returns the rows of all parts, of which any run of consecutive rollouts, such as a mini-batch,
    has its share of each part. Rows of a rollout stay adjacent.
    """
    numbers = [part.rollouts.of_row for part in parts]
    place = torch.cat([index / (int(index[-1]) + 1) for index in numbers])
    return Experience.join(parts).select(place.argsort(stable=True))
