"""Combines two losses in one gradient accumulation, each averaged over its own count, although
gradients are divided once.

With A a first loss's sum over n things and B a second's over m: A / n + c B / m = (A + c n / m B) /
n. So the second is scaled beforehand and adds nothing to the count.
"""

from dataclasses import replace
from typing import Any

import torch

from rftmega.core.ragged import chunks
from rftmega.core.types import Auxiliary, Experience, LossFn, TokenLoss


def beside(first: LossFn, experience: Experience[Any], auxiliary: Auxiliary, stats: Any) -> LossFn:
    """Returns the auxiliary loss as a function of any part of its rows, to be summed with `first`
    over `experience` and divided once.

    If the first loss counts nothing (all completions left out), the second is counted instead.
    `stats`: see `counted`.
    """
    count = counted(first, experience, stats)
    own = counted(auxiliary.loss_fn, auxiliary.experience, stats)
    scale = auxiliary.coef * (count / max(own, 1) if count else 1.0)

    def loss(stats: Any, experience: Experience) -> TokenLoss:
        found = auxiliary.loss_fn(stats, experience)
        metrics = {f"{auxiliary.name}_{name}": metric for name, metric in found.metrics.items()}
        return TokenLoss(
            found.value,
            found.weight * scale,
            torch.zeros_like(found.count) if count else found.count,
            metrics,
        )

    return loss


def counted(loss_fn: LossFn, experience: Experience[Any], stats: Any) -> int:
    """Returns the count of `loss_fn` over all of `experience`, computed with `stats` (TokenStats or
    TokenValues) of zeros.
    """
    names = stats.__dataclass_fields__
    count = 0
    for index in chunks(experience.lengths):
        part = replace(experience.select(index), routes=None).padded()
        zeros = torch.zeros_like(part.advantage)
        loss = loss_fn(stats(*[zeros] * len(names)), replace(part, old_logp=zeros))
        count += int(loss.count)
    return count
