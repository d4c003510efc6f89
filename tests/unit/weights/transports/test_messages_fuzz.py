"""Messages of pushes with anything in them: they are read, or refused by an error of ours."""

import random

import pytest
import torch

from rftmega.core.errors import EngineError
from rftmega.core.shards import LogicalTensor
from rftmega.models.hf.hf_folder import PlannedTensor
from rftmega.weights.slice_sums import sum_of
from rftmega.weights.slices import TensorSlice
from rftmega.weights.transports.adapter_message import opened, packed
from rftmega.weights.transports.transfer_plan import (
    packed_needs,
    packed_plan,
    unpacked_needs,
    unpacked_plan,
)
from tests.unit.rollout.servers.test_unreadable_replies import spoilt

SHAPES = {"a.weight": (4, 6), "b": (3,)}
NEEDS = {"a.weight": [((0, 4), (0, 3)), ((0, 2), (3, 6))], "b": [((1, 3),)]}


def test_of_2000_mutated_payloads_each_is_the_one_that_was_sent_or_an_error() -> None:
    pairs = {"a.lora_A.weight": torch.arange(6.0).view(2, 3)}
    sums = {name: sum_of(tensor) for name, tensor in pairs.items()}
    plain = packed(7, pairs, {"r": 2}, sums)
    random_of = random.Random(5)
    for _ in range(2000):
        try:
            _, found, _ = opened(spoilt(plain, random_of), 7)
        except EngineError:
            continue
        for tensor in found.values():
            assert torch.equal(tensor.flatten(), pairs["a.lora_A.weight"].flatten())


@pytest.mark.parametrize("dtype", ["nn", "load", "no such", "", "__doc__", "Tensor"])
def test_what_is_no_dtype_is_refused(dtype: str) -> None:
    tensor = torch.zeros(2, 3)
    plain = packed(7, {"a": tensor}, {}, {"a": sum_of(tensor)})
    named = len(dtype).to_bytes(1, "big")
    other = plain.replace(b"\xa7float32", bytes([0xA0 + named[0]]) + dtype.encode())
    with pytest.raises(EngineError, match="has no dtype of torch's"):
        opened(other, 7)


def test_of_2000_mutated_needs_each_is_within_the_tensors_or_refused() -> None:
    plain = packed_needs(NEEDS)
    assert unpacked_needs(plain, SHAPES) == NEEDS
    random_of = random.Random(6)
    for _ in range(2000):
        try:
            found = unpacked_needs(spoilt(plain, random_of), SHAPES)
        except ValueError:
            continue
        for name, boxes in found.items():
            for box in boxes:
                torch.empty(SHAPES[name])[tuple(slice(*edges) for edges in box)]
                assert all(
                    0 <= start <= stop <= size
                    for (start, stop), size in zip(box, SHAPES[name], strict=True)
                )


@pytest.mark.parametrize(
    "needs",
    [
        {"c": [((0, 1),)]},
        {"b": [((0, 4),)]},
        {"b": [((-1, 2),)]},
        {"b": [((2, 1),)]},
        {"b": [((0, 1), (0, 1))]},
        {"b": [()]},
    ],
)
def test_a_worker_can_not_ask_for_what_is_not_there(needs: dict[str, list[tuple[()]]]) -> None:
    with pytest.raises(ValueError):
        unpacked_needs(packed_needs(needs), SHAPES)


def test_of_2000_mutated_plans_each_is_read_or_refused() -> None:
    tensors = [PlannedTensor(name, torch.float32, shape) for name, shape in SHAPES.items()]
    logical = LogicalTensor(("b",), ((3,),), torch.float32)
    plain = packed_plan([tensors], [{0: [TensorSlice(logical, 0, ((0, 2),))]}])
    assert [bucket.tensors for bucket in unpacked_plan(plain)] == [tensors]
    random_of = random.Random(8)
    for _ in range(2000):
        try:
            unpacked_plan(spoilt(plain, random_of))
        except ValueError:
            continue
