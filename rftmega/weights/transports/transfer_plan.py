"""Serialised transfer plan: the slices that one engine worker receives from each trainer process.

Workers send their needs (the blocks that they read) and trainer processes reply with plans, both as
MessagePack.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from rftmega.core.shards import Box, LogicalTensor
from rftmega.models.hf.hf_folder import PlannedTensor
from rftmega.weights.message import Layout
from rftmega.weights.needs import Needs
from rftmega.weights.slices import TensorSlice

PlacedBox = tuple[int, Box]  # index of a tensor in a bucket, and a box of it
ToldTensor = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


class ToldBucket(msgspec.Struct, array_like=True):
    """ToldBucket is the serialised form of a bucket: its tensors, and the slices that a worker
    receives from each trainer process.
    """

    tensors: list[ToldTensor]
    slices: dict[int, list[PlacedBox]]  # by source, in the order of its message


_buckets = msgspec.msgpack.Decoder(list[ToldBucket])
_needs = msgspec.msgpack.Decoder(dict[str, list[Box]])


def packed_needs(needs: Needs) -> bytes:
    return msgspec.msgpack.encode(needs)


def unpacked_needs(told: bytes, shapes: Mapping[str, Sequence[int]] | None = None) -> Needs:
    """Decodes a worker's needs, the blocks (boxes) that it reads, by HF name. `told`: the encoded
    needs; `shapes`: the shape of each tensor. Raises ValueError if the bytes are invalid or, with
    `shapes`, a name is unknown or a block lies outside its tensor.
    """
    needs = _needs.decode(told)
    for name, boxes in needs.items() if shapes is not None else ():
        assert shapes is not None
        if name not in shapes:
            raise ValueError(f"there is no {name[:80]!r}")
        for box in boxes:
            within = [
                0 <= start <= stop <= size
                for (start, stop), size in zip(box, shapes[name], strict=True)
            ]
            if not all(within):
                raise ValueError(f"{name} of {tuple(shapes[name])} has no {box}")
    return needs


def told_tensors(tensors: Iterable[PlannedTensor]) -> list[ToldTensor]:
    return [
        (name, str(dtype).removeprefix("torch."), tuple(shape)) for name, dtype, shape in tensors
    ]


def packed_plan(
    buckets: Sequence[Sequence[PlannedTensor]],
    receives: Sequence[Mapping[int, Sequence[TensorSlice]]],
) -> bytes:
    """Encodes the plan for one worker: the slices that it receives.

    `buckets`: the tensors of each bucket; `receives`: for each bucket, the slices by source
    process, in the order of the message.
    """
    told = []
    for tensors, of_sources in zip(buckets, receives, strict=True):
        place = {name: number for number, (name, _, _) in enumerate(tensors)}
        slices = {
            source: [(place[each.name], each.box) for each in theirs]
            for source, theirs in of_sources.items()
        }
        told.append(ToldBucket(told_tensors(tensors), slices))
    return msgspec.msgpack.encode(told)


class ReceivedBucket:
    """ReceivedBucket is a bucket on the receiving worker: its tensors, and the layout of the
    message from each trainer process. `told`: the serialised bucket.
    """

    def __init__(self, told: ToldBucket):
        dtypes = [(name, _dtype(dtype), shape) for name, dtype, shape in told.tensors]
        self.tensors = [PlannedTensor(*tensor) for tensor in dtypes]
        logical = [LogicalTensor((name,), (shape,), dtype) for name, dtype, shape in self.tensors]
        places = [place for theirs in told.slices.values() for place, _ in theirs]
        if places and not 0 <= min(places) <= max(places) < len(logical):
            raise ValueError(f"a plan of {len(logical)} tensors names number {max(places)}")
        self.layouts = {
            source: Layout([TensorSlice(logical[place], 0, box) for place, box in theirs])
            for source, theirs in told.slices.items()
        }


def unpacked_plan(told: bytes) -> list[ReceivedBucket]:
    """Decodes the plan that `packed_plan` encoded for this worker, and returns its buckets. Raises
    ValueError if the plan is invalid.
    """
    return [ReceivedBucket(bucket) for bucket in _buckets.decode(told)]


def _dtype(name: str) -> torch.dtype:
    found: Any = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype of torch")
    return found
