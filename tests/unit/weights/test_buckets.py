"""How a model is cut into buckets."""

import torch

from rftmega.core.shards import LogicalTensor
from rftmega.weights.slices import buckets_of


def tensor(
    name: str,
    layer: int | None = None,
    expert: int | None = None,
    *,
    rows: int = 10,
    dtype: torch.dtype = torch.float32,
) -> LogicalTensor:
    return LogicalTensor((name,), ((rows,),), dtype, layer, expert)


def names(buckets: list[list[LogicalTensor]]) -> list[list[str]]:
    return [[each.names[0] for each in bucket] for bucket in buckets]


EXPERTS = [
    tensor("router", 0),
    tensor("up", 0, 0),
    tensor("down", 0, 0),
    tensor("up", 0, 1),
    tensor("down", 0, 1),
    tensor("up", 1, 0),
]


def test_buckets_are_filled_up_to_their_size_and_hold_one_dtype() -> None:
    tensors = [
        tensor("a"),
        tensor("b"),
        tensor("c"),
        tensor("large", rows=100),
        tensor("d"),
        tensor("half", dtype=torch.bfloat16),
    ]
    assert names(buckets_of(tensors, 80)) == [["a", "b"], ["c"], ["large"], ["d"], ["half"]]


def test_the_experts_of_a_layer_stay_together_for_an_engine_alone() -> None:
    assert names(buckets_of(EXPERTS, 80)) == [["router", "up"], ["down", "up"], ["down", "up"]]
    assert names(buckets_of(EXPERTS, 80, for_an_engine=True)) == [
        ["router"],
        ["up", "down", "up", "down"],
        ["up"],
    ]
