"""How a model is cut into buckets."""

import torch

from converters import HFTensor, Replicated
from rftmega.weights.units import Unit, buckets_of


def unit(
    name: str,
    layer: int | None = None,
    expert: int | None = None,
    *,
    rows: int = 10,
    dtype=torch.float32,
) -> Unit:  # type: ignore[no-untyped-def]
    return Unit(Replicated((name,), (HFTensor(name, (rows,)),)), layer, expert, dtype, ((0,),))


def names(buckets: list[list[Unit]]) -> list[list[str]]:
    return [[unit.rule.megatron[0] for unit in bucket] for bucket in buckets]


EXPERTS = [
    unit("router", 0),
    unit("up", 0, 0),
    unit("down", 0, 0),
    unit("up", 0, 1),
    unit("down", 0, 1),
    unit("up", 1, 0),
]


def test_buckets_are_filled_up_to_their_size_and_hold_one_dtype() -> None:
    units = [
        unit("a"),
        unit("b"),
        unit("c"),
        unit("large", rows=100),
        unit("d"),
        unit("half", dtype=torch.bfloat16),
    ]
    assert names(buckets_of(units, 80)) == [["a", "b"], ["c"], ["large"], ["d"], ["half"]]


def test_the_experts_of_a_layer_stay_together_for_an_engine_alone() -> None:
    assert names(buckets_of(EXPERTS, 80)) == [["router", "up"], ["down", "up"], ["down", "up"]]
    assert names(buckets_of(EXPERTS, 80, for_an_engine=True)) == [
        ["router"],
        ["up", "down", "up", "down"],
        ["up"],
    ]
