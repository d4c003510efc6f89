"""Gathers the trainer's shards into whole HF-named tensors on every process of a model replica, one
bucket of tensors at a time.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.core.shards import Holding, LogicalTensor, Shard, narrowed, shape_of, volume
from rftmega.models.hf.hf_folder import PlannedTensor
from rftmega.weights.slices import (
    LocalShards,
    TensorSlice,
    buckets_of,
    everybodys_tensors,
    planned,
)


class Exporter:
    """Exporter iterates over a sharded model as whole HF-named tensors.

    The iteration is a collective: every process of the replica must run it in the same order.
    """

    def __init__(self, shards: Sequence[Shard], group: Any, *, bucket_bytes: int):
        """Finds out which process of `group` (the processes of one replica of the model; None: all
        processes) holds which block of which tensor; a collective. `shards`: the shards of this
        process; `bucket_bytes`: most bytes that are gathered at a time.
        """
        self.group = group
        self._shards = LocalShards(shards)
        self.buckets = buckets_of(everybodys_tensors(shards, group), bucket_bytes)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (HF name, whole tensor), layer by layer, always in the same order."""
        for bucket in self.buckets:
            yield from self.gathered(bucket)

    @property
    def planned(self) -> list[PlannedTensor]:
        """Returns name, dtype and shape of each tensor that an iteration
        yields, in the same order.
        """
        return planned(tensor for bucket in self.buckets for tensor in bucket)

    @property
    def total_bytes(self) -> int:
        return sum(tensor.bytes for bucket in self.buckets for tensor in bucket)

    @torch.no_grad()
    def gathered(self, bucket: Sequence[LogicalTensor]) -> list[tuple[str, Tensor]]:
        """Gathers the whole tensors of a bucket; a collective. Returns (HF name, whole tensor), in
        the order of `planned`.
        """
        # the first holder of each shard sends its part of the bucket as one flat tensor, which all
        # processes copy to its places (replicas of a shard are equal)
        sent: dict[int, list[tuple[LogicalTensor, Holding]]] = {}
        for tensor in bucket:
            for holding, ranks in tensor.holders:
                sent.setdefault(ranks[0], []).append((tensor, holding))
        found = {
            (tensor.names, number): self._empty(tensor, number)
            for tensor in bucket
            for number in range(len(tensor.names))
        }
        for source, theirs in sent.items():
            parts = [
                TensorSlice(tensor, number, box)
                for tensor, holding in theirs
                for number, box in holding
            ]
            flat = self._sent(source, parts)
            sizes = [volume(part.box) for part in parts]
            for part, elements in zip(parts, flat.split(sizes), strict=True):
                whole = found[part.tensor.names, part.number]
                narrowed(whole, part.box).copy_(elements.view(shape_of(part.box)))
        return [(names[number], whole) for (names, number), whole in found.items()]

    def _empty(self, tensor: LogicalTensor, number: int) -> Tensor:
        return torch.empty(tensor.shapes[number], dtype=tensor.dtype, device=self._shards.device)

    def _sent(self, source: int, parts: Sequence[TensorSlice]) -> Tensor:
        """Broadcasts the elements of the slices `parts` from process `source`. Returns the elements
        as one flat tensor [n].
        """
        if source == dist.get_rank():
            flat = torch.cat([self._shards.slice_of(part).flatten() for part in parts])
        else:
            elements = sum(volume(part.box) for part in parts)
            flat = torch.empty(elements, dtype=parts[0].tensor.dtype, device=self._shards.device)
        if dist.get_world_size(self.group) > 1:
            dist.broadcast(flat, src=source, group=self.group)
        return flat
