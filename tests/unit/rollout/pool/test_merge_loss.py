"""How much of what adapters add is lost where weights of fewer digits take it, against float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.core.shards import LogicalTensor, Shard, ShardPart, lost_share
from rftmega.rollout.pool.colocated_weights import ColocatedWeights


class Added:
    def __init__(self, product: Tensor):
        self.product = product

    def of(self, box: Any) -> Tensor:
        rows, columns = (slice(*ends) for ends in box)
        return self.product[rows, columns]


def shard(weight: Tensor, product: Tensor | None) -> Shard:
    """Of two parts, one behind the other, and a row of padding."""
    rows, columns = weight.shape
    half = (rows - 1) // 2
    logical = LogicalTensor(("a", "b"), ((half, columns), (rows - 1 - half, columns)), weight.dtype)
    parts = (
        ShardPart(0, ((0, half), (0, columns)), (0, 0)),
        ShardPart(1, ((0, rows - 1 - half), (0, columns)), (half, 0)),
    )
    return Shard(logical, parts, weight, None if product is None else Added(product))


@pytest.mark.parametrize(("size", "least", "most"), [(1e-5, 0.8, 1.1), (1e-1, 0.0, 0.02)])
def test_the_share_that_rounding_takes_is_that_of_sums_in_float64(
    size: float, least: float, most: float
) -> None:
    torch.manual_seed(1)
    weight = (torch.randn(33, 24) * 0.02).bfloat16()
    product = torch.randn(33, 24) * size
    whole = weight.double() + product.double()
    error = ((weight.float() + product).bfloat16().double() - whole)[:-1]
    wanted = float(error.norm() / product[:-1].double().norm())
    frozen = shard(weight, None)
    found = lost_share([shard(weight, product), frozen], lambda mine: mine)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert least <= found <= most
    twice = lost_share([shard(weight, product)], lambda mine: 2 * mine)
    assert twice == pytest.approx(wanted, rel=1e-4)
    assert lost_share([shard(weight.float(), product)], lambda mine: mine) < 1e-2
    assert lost_share([frozen], lambda mine: mine) == 0.0


def test_a_push_of_merged_weights_tells_what_rounding_took() -> None:
    weight = torch.ones(3, 2).bfloat16()
    lost = [shard(weight, torch.full((3, 2), 1e-6))]  # far below the last digit of 1
    sync: Any = SimpleNamespace(push=lambda version: {"push_buffer_bytes": 0.0})
    phases: Any = SimpleNamespace(push=lambda: None, pushed=lambda size: {})
    assert ColocatedWeights(sync, phases, lost).push(version=1)["push_lost_share"] == 1.0
    assert ColocatedWeights(sync, phases, []).push(version=1)["push_lost_share"] == 0.0
    assert "push_lost_share" not in ColocatedWeights(sync, phases).push(version=1)
