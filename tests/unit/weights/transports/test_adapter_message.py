"""Adapters in one message: they come out as they went in, and nothing else is taken for them."""

import msgspec
import pytest
import torch

from rftmega.core.errors import EngineError
from rftmega.weights.slice_sums import sum_of
from rftmega.weights.transports.adapter_message import opened, packed

PAIRS = {
    "a.lora_A.weight": torch.arange(6.0).view(2, 3),
    "a.lora_B.weight": torch.arange(8.0).view(4, 2).bfloat16().t(),
}
SAID = {"r": 2, "lora_alpha": 4.0}
SUMS = {name: sum_of(tensor.contiguous()) for name, tensor in PAIRS.items()}


def test_adapters_come_out_as_they_went_in_and_are_nobody_elses() -> None:
    message = packed(7, PAIRS, SAID, SUMS, number=3)
    number, found, said = opened(message, 7)
    assert (number, said) == (3, SAID) and list(found) == list(PAIRS)
    for name, tensor in found.items():
        assert tensor.dtype == PAIRS[name].dtype and torch.equal(tensor, PAIRS[name])
        tensor.mul_(2)  # as vLLM does
    assert torch.equal(opened(message, 7)[1]["a.lora_A.weight"], PAIRS["a.lora_A.weight"])


def test_every_other_bit_of_the_elements_is_noticed() -> None:
    message = packed(7, {"a.lora_A.weight": PAIRS["a.lora_A.weight"]}, SAID, SUMS)
    for place in range(1, 24):
        spoilt = bytearray(message)
        spoilt[-place] ^= 1
        with pytest.raises(EngineError, match="a.lora_A.weight of push 7 is not as it was sent"):
            opened(bytes(spoilt), 7)


def test_what_is_another_pushs_or_no_payload_is_refused() -> None:
    message = packed(7, PAIRS, SAID, SUMS)
    with pytest.raises(EngineError, match="push 7 came in the place of push 8's"):
        opened(message, 8)
    with pytest.raises(EngineError, match="can't be read"):
        opened(message[:-9], 7)
    tensors = [["a.lora_A.weight", "float32", [2, 3], SUMS["a.lora_A.weight"], b"\0" * 20]]
    with pytest.raises(EngineError, match="has not the size"):
        opened(msgspec.msgpack.encode([7, 1, SAID, tensors]), 7)
