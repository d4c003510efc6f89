"""Adapter payload for servers: all matrices under their PEFT names in one message."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from rftmega.core.errors import EngineError
from rftmega.weights.slice_sums import sum_of

# adapter numbers in an engine
NONE = 0  # the base model
POLICY = 1


class PayloadTensor(msgspec.Struct, array_like=True):
    """PayloadTensor is one adapter matrix in serialised form. `name`: its PEFT name; `checksum`: of
    the matrix as it was gathered; `elements`: its bytes.
    """

    name: str
    dtype: str
    shape: list[int]
    checksum: int
    elements: bytes


class AdapterPayload(msgspec.Struct, array_like=True):
    """AdapterPayload is the adapter of one push in serialised form: PEFT's adapter config and the
    matrices.
    """

    version: int
    number: int  # of the adapter in the engine
    said: dict[str, Any]  # PEFT's config
    tensors: list[PayloadTensor]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AdapterPayload)


def packed(
    version: int,
    pairs: Mapping[str, Tensor],
    said: Mapping[str, Any],
    sums: Mapping[str, int],
    *,
    number: int = POLICY,
) -> bytes:
    """Serialises an adapter for push `version`. `pairs`: the matrices by their PEFT names; `said`:
    PEFT's adapter config; `sums`: the checksum of each matrix as it was gathered; `number`: the
    adapter's number in the engine.
    """
    tensors = []
    for name, tensor in pairs.items():
        whole = tensor.detach().contiguous().cpu()
        elements = whole.view(torch.uint8).numpy().tobytes()
        dtype = str(whole.dtype).removeprefix("torch.")
        tensors.append(PayloadTensor(name, dtype, list(whole.shape), sums[name], elements))
    return _encoder.encode(AdapterPayload(version, number, dict(said), tensors))


def opened(message: bytes, version: int) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    """Decodes `message`, the adapter payload of push `version`. Returns the adapter's number, its
    matrices by their PEFT names (in newly allocated memory), and PEFT's adapter config.

    Raises EngineError if the payload can't be read or belongs to another push, or a matrix differs
    from what was sent.
    """
    try:
        payload = _decoder.decode(message)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"The adapters of push {version} can't be read: {error}") from error
    if payload.version != version:
        raise EngineError(
            f"The adapters of push {payload.version} came in the place of push {version}'s."
        )
    found = {}
    for each in payload.tensors:
        dtype = getattr(torch, each.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise EngineError(f"{each.name} of push {version} has no dtype of torch's.")
        size = math.prod(each.shape) * dtype.itemsize
        if min(each.shape, default=1) < 1 or len(each.elements) != size:
            raise EngineError(f"{each.name} of push {version} has not the size that was sent.")
        tensor = torch.frombuffer(bytearray(each.elements), dtype=dtype).view(each.shape)
        if sum_of(tensor) != each.checksum:
            raise EngineError(f"{each.name} of push {version} is not as it was sent.")
        found[each.name] = tensor
    return payload.number, found, payload.said
