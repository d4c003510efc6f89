"""Combines two losses in one gradient accumulation, each averaged over its own count, although
gradients are divided only once.
With A the sum of the first loss over n tokens and B that of the second over m tokens: A / n + c B /
m = (A + (c n / m) B) / n. So the second loss is multiplied by c n / m, and contributes nothing to
the count.
"""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from rftmega.core.ragged import chunks
from rftmega.core.types import Auxiliary, Experience, LossFn, TokenLoss


def beside(first: LossFn, experience: Experience[Any], auxiliary: Auxiliary, stats: Any) -> LossFn:
    """Returns the loss function of `auxiliary`, scaled such that its sum can be added to that of
    `first` before gradients are divided by the count of `first` (number of tokens in the loss).

    The returned function applies to any part of the auxiliary rows. `experience`: all rows of the
    step on which `first` is computed. `stats`: see `counted`. If the count of `first` is 0 (all
    completions are left out), gradients are divided by the count of the auxiliary loss instead.
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


def statistics_of(stats: Any, values: Tensor, *, teachers: int) -> Any:
    """Returns statistics of class `stats` (TokenStats or TokenValues) that are all `values` [B, T],
    and a divergence of 0 from each of the `teachers`.
    """
    named = {each.name for each in fields(stats)}
    found = stats(**dict.fromkeys(named - {"routes", "divergence"}, values))
    if not teachers or "divergence" not in named:
        return found
    return replace(found, divergence=values.new_zeros(*values.shape, teachers))


def counted(loss_fn: LossFn, experience: Experience[Any], stats: Any) -> int:
    """Returns the number of tokens (or other terms) over which `loss_fn` averages, its
    `TokenLoss.count`, in all rows of `experience`.

    The loss is called with statistics that are all zero, of class `stats` (TokenStats or
    TokenValues).
    """
    count = 0
    for index in chunks(experience.lengths):
        part = replace(experience.select(index), routes=None).padded()
        zeros = torch.zeros_like(part.advantage)
        seen = statistics_of(stats, zeros, teachers=len(part.teachers))
        loss = loss_fn(seen, replace(part, old_logp=zeros))
        count += int(loss.count)
    return count
