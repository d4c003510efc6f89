"""Finds out which process holds which block (box) of which tensor of the model: once, from the
shards of all processes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.core.shards import (
    Box,
    Holding,
    LogicalTensor,
    Shard,
    intersection,
    narrowed,
    shape_of,
    volume,
    within,
)
from rftmega.models.hf.hf_folder import PlannedTensor
from rftmega.runtime.parallel.collectives import gather_objects


class TensorSlice(NamedTuple):
    """TensorSlice is a block (box) of one HF tensor: number `number` among the HF tensors of the
    LogicalTensor `tensor`.
    """

    tensor: LogicalTensor
    number: int  # of the HF tensor
    box: Box

    @property
    def name(self) -> str:
        return self.tensor.names[self.number]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(shape_of(self.box))

    @property
    def bytes(self) -> int:
        return volume(self.box) * self.tensor.dtype.itemsize

    @property
    def kind(self) -> tuple[str, int]:
        """Returns a key that is equal for slices of the same HF tensor in other
        layers and experts.
        """
        return self.tensor.kind, self.number

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(f'{start}:{stop}' for start, stop in self.box)}]"


class LocalShards:
    """LocalShards looks up elements of HF tensors in the shards of this process."""

    def __init__(self, shards: Sequence[Shard]):
        # several parameters may be parts of one tensor
        self._held: dict[tuple[str, ...], list[Shard]] = {}
        for shard in shards:
            self._held.setdefault(shard.logical.names, []).append(shard)
        # elements with an addend are computed on each access and not cached
        self.computed = any(shard.addend is not None for shard in shards)
        self.device = shards[0].tensor.device
        self.generation = 0  # of the cached views
        self._kept: dict[int, tuple[list[TensorSlice], list[Tensor]]] = {}
        self._storages: list[int] = []

    def pieces(self, tensor: LogicalTensor, number: int) -> list[tuple[Box, Tensor]]:
        """Returns the blocks (boxes) of HF tensor number `number` of `tensor` that this process
        holds, with their elements; see `Shard.views`.
        """
        held = self._held.get(tensor.names, ())
        return [piece for shard in held for piece in shard.views(number)]

    def boxes(self, tensor: LogicalTensor, number: int) -> list[Box]:
        """Returns the blocks (boxes) of HF tensor number `number` of `tensor` that this process
        holds.
        """
        held = self._held.get(tensor.names, ())
        return [part.box for shard in held for part in shard.parts if part.number == number]

    def missing(self, tensor: LogicalTensor, number: int, boxes: Iterable[Box]) -> int:
        """Returns how many elements of `boxes`, disjoint blocks of HF tensor number `number` of
        `tensor`, this process does not hold.
        """
        boxes = list(boxes)
        found = sum(map(volume, boxes))
        for here in self.boxes(tensor, number):
            common = [intersection(here, box) for box in boxes]
            found -= sum(volume(each) for each in common if each)
        return found

    def slice_of(self, wanted: TensorSlice, pieces: dict[Any, Tensor] | None = None) -> Tensor:
        """Returns the elements of a slice, which must lie within one block that this process holds.
        If `pieces` is given, the elements of whole blocks are cached in it.

        A block with an addend is always computed as a whole, so every slice of it has the same
        bits.
        """
        pieces = {} if pieces is None else pieces
        for shard in self._held.get(wanted.tensor.names, ()):
            for part in shard.parts:
                common = intersection(part.box, wanted.box)
                if part.number == wanted.number and common == wanted.box:
                    key = wanted.tensor.names, part
                    if key not in pieces:
                        pieces[key] = shard.elements(part)
                    return narrowed(pieces[key], within(wanted.box, part.box))
        raise AssertionError(f"planned to send {wanted}, which is not here")

    def slices_of(self, wanted: list[TensorSlice]) -> list[Tensor]:
        """Returns the elements of each slice. Views of parameters are cached for each list object
        passed as `wanted`, until `look_again` finds new memory; blocks with addends are computed in
        each call, once per block.
        """
        if self.computed:
            pieces: dict[Any, Tensor] = {}
            return [self.slice_of(each, pieces) for each in wanted]
        kept = self._kept.get(id(wanted))
        if kept is None or kept[0] is not wanted:
            kept = self._kept[id(wanted)] = wanted, [self.slice_of(each) for each in wanted]
        return kept[1]

    def look_again(self) -> None:
        """Drops the cached views if a parameter has new memory (e.g. after assigning `.data`). A
        storage that was freed and refilled, as offloading does, counts as the same memory.
        """
        held = [shard for shards in self._held.values() for shard in shards]
        storages = [shard.tensor.untyped_storage()._cdata for shard in held]
        if storages != self._storages:
            self._storages = storages
            self._kept.clear()
            self.generation += 1


def planned(tensors: Iterable[LogicalTensor]) -> list[PlannedTensor]:
    """Returns name, dtype and shape of the HF tensors in `tensors`, in the same order."""
    return [
        PlannedTensor(name, tensor.dtype, shape)
        for tensor in tensors
        for name, shape in zip(tensor.names, tensor.shapes, strict=True)
    ]


def everybodys_tensors(shards: Sequence[Shard], group: Any = None) -> list[LogicalTensor]:
    """Gathers the tensors that the processes of `group` (None: all processes) hold; a collective.
    Returns all tensors of the model in model order, each with the blocks that its holders have; the
    result is the same on every process. `shards`: the shards of this process.
    """
    mine = [
        (replace(shard.logical, holders=()), tuple((part[0], part[1]) for part in shard.parts))
        for shard in shards
    ]
    told = gather_objects((dist.get_rank(), mine), group)
    found: dict[tuple[str, ...], LogicalTensor] = {}
    holders: dict[tuple[str, ...], dict[Holding, list[int]]] = {}
    for process, theirs in told:
        for tensor, parts in theirs:
            found.setdefault(tensor.names, tensor)
            everybody = holders.setdefault(tensor.names, {})
            if parts:  # a shard may be only padding
                everybody.setdefault(parts, []).append(process)
    # equal values share one object, so that plans can be reused for all layers
    alike: dict[Any, Any] = {}
    tensors = []
    for names, tensor in found.items():
        theirs = tuple((parts, tuple(ranks)) for parts, ranks in sorted(holders[names].items()))
        shapes = alike.setdefault(tensor.shapes, tensor.shapes)
        tensors.append(replace(tensor, shapes=shapes, holders=alike.setdefault(theirs, theirs)))
    return in_order(tensors)


def in_order(tensors: Sequence[LogicalTensor]) -> list[LogicalTensor]:
    """Returns the tensors in model order: embedding, layers (each with its experts last), norm,
    head.
    """
    layers = [each for each in tensors if each.layer is not None]
    layers.sort(key=lambda each: (each.layer, -1 if each.expert is None else each.expert))
    outside = [each for each in tensors if each.layer is None]
    first = [each for each in outside if each.opens]
    last = [each for each in outside if not each.opens]
    return first + layers + last


def buckets_of(
    tensors: Sequence[LogicalTensor], bucket_bytes: int, *, for_an_engine: bool = False
) -> list[list[LogicalTensor]]:
    """Groups consecutive tensors of one dtype into buckets of up to `bucket_bytes`; a larger tensor
    gets its own bucket.

    With `for_an_engine`, the experts of a layer stay in one bucket, since an engine loads them
    together.
    """
    groups: list[list[LogicalTensor]] = []
    for tensor in tensors:
        last = groups[-1][-1] if groups else tensor
        experts = None not in (tensor.expert, last.expert) and last.layer == tensor.layer
        if groups and for_an_engine and experts and last.dtype == tensor.dtype:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    buckets: list[list[LogicalTensor]] = []
    size = 0
    for group in groups:
        more = sum(tensor.bytes for tensor in group)
        if not buckets or size + more > bucket_bytes or group[0].dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1] += group
        size += more
    return buckets
