import math

import pytest
import torch
from torch import Tensor

from rftmega.algorithms.aggregation import AGGREGATIONS
from rftmega.algorithms.values import value_loss
from rftmega.core.types import Experience, TokenValues

LENGTHS = [6, 3, 1, 4]  # prompts of one token


def experience_of(old: Tensor, returns: Tensor) -> Experience:
    size = torch.tensor(LENGTHS)
    mask = torch.arange(1, old.shape[1] + 1) < size[:, None]
    nothing = torch.zeros_like(old)
    tokens = torch.zeros(len(old), old.shape[1] + 1, dtype=torch.int64)
    one = torch.ones_like(size)
    return Experience(
        tokens, one, size, mask, nothing, nothing, None, nothing, old_value=old, returns=returns
    )


def by_hand(
    value: Tensor, old: Tensor, returns: Tensor, clip: float, huber: float, aggregation: str
) -> Tensor:
    """A double loop, straight from the formula."""

    def distance(v: Tensor, target: float) -> Tensor:
        apart = abs(float(v.detach()) - target)
        if huber and apart > huber:
            return huber * ((v - target).abs() - huber / 2)
        return (v - target) ** 2 / 2

    total, things = torch.zeros((), dtype=torch.float64), 0
    for b, length in enumerate(LENGTHS):
        tokens = length - 1
        things += tokens if aggregation == "token_mean" else int(tokens > 0)
        for t in range(tokens):
            v, before, target = value[b, t], float(old[b, t]), float(returns[b, t])
            found = distance(v, target)
            if clip:
                inside = before - clip < float(v.detach()) < before + clip
                held = (
                    v
                    if inside
                    else torch.tensor(
                        before + math.copysign(clip, float(v.detach()) - before)
                    ).double()
                )
                other = distance(held, target)
                found = other if float(other.detach()) > float(found.detach()) else found
            total = total + found * (1 / tokens if aggregation == "sequence_mean" else 1.0)
    return total / things


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize(("clip", "huber"), [(0.0, 0.0), (0.2, 0.0), (0.0, 0.3), (0.2, 0.3)])
def test_value_and_gradient_are_those_of_a_double_loop(
    clip: float, huber: float, aggregation: str
) -> None:
    torch.manual_seed(0)
    old, returns = torch.randn(4, 5).double(), torch.randn(4, 5).double()
    moved = (old + 0.4 * torch.randn(4, 5)).detach()
    mine, theirs = moved.clone().requires_grad_(), moved.clone().requires_grad_()
    experience = experience_of(old, returns)
    dirty = torch.where(experience.mask, mine, torch.nan)
    loss = value_loss(clip=clip, huber=huber, aggregation=AGGREGATIONS[aggregation])(
        TokenValues(dirty), experience
    )
    found = (loss.value * loss.weight).sum() / loss.count
    wanted = by_hand(theirs, old, returns, clip, huber, aggregation)
    assert found.item() == pytest.approx(wanted.item(), abs=1e-6)
    found.backward()
    wanted.backward()
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=0)


def test_a_value_that_moved_too_far_towards_its_return_is_not_pulled_further() -> None:
    old, returns = torch.zeros(4, 5), torch.ones(4, 5)
    value = torch.full((4, 5), 0.3).requires_grad_()
    loss = value_loss(clip=0.2)(TokenValues(value), experience_of(old, returns))
    (loss.value * loss.weight).sum().backward()
    assert value.grad is not None
    assert value.grad.abs().sum() == 0
    assert loss.metrics["value_clip_fraction"].value[0].tolist() == [1.0] * 5
