"""Gathers shards into whole HF-named tensors on every process of a replica, one bucket at a time."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from converters import assemble, shard_shape
from converters.hf_folder import PlannedTensor
from rftmega.weights.units import HeldShard, Key, Unit, buckets_of, key_of, units_of

if TYPE_CHECKING:  # so that a push can be planned without Megatron
    from rftmega.parallel.topology import Topology


class Exporter:
    """Iterates over the policy as HF-named tensors.

    A collective: every process of the replica iterates in step.
    """

    def __init__(self, held: Sequence[HeldShard], topology: "Topology", *, bucket_bytes: int):
        """Learns once, from all processes of the replica, who holds what."""
        self.group = topology.replica_group
        self._parameter: dict[Key, Tensor] = {
            key_of(item): item.parameter for item in held if item.rule.exported
        }
        self._device = held[0].parameter.device
        self.buckets = buckets_of(units_of(held, self.group), bucket_bytes)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (HF name, whole tensor), layer by layer, always in the same order."""
        for bucket in self.buckets:
            shards = self._gather(bucket)
            for unit, held in zip(bucket, shards, strict=True):
                yield from zip(
                    unit.rule.hf_names(unit.layer, unit.expert),
                    assemble(unit.rule, held),
                    strict=True,
                )

    @property
    def planned(self) -> list[PlannedTensor]:
        """Lists the tensors that an iteration will give, in its order."""
        return [tensor for bucket in self.buckets for unit in bucket for tensor in unit.planned]

    @property
    def total_bytes(self) -> int:
        return sum(unit.bytes for bucket in self.buckets for unit in bucket)

    @torch.no_grad()
    def _gather(self, bucket: Sequence[Unit]) -> list[list[Tensor]]:
        """Gathers a bucket: one holder of each shard sends what it has of the bucket as one flat
        tensor; per unit, the shards in their order.
        """
        shards: dict[tuple[Key, int], Tensor] = {}
        # replicas of a shard are equal: the first sends
        sent: dict[int, list[tuple[Unit, int]]] = {}
        for unit in bucket:
            for number, holders in enumerate(unit.holders):
                sent.setdefault(holders[0], []).append((unit, number))
        for source, theirs in sent.items():
            shapes = [shard_shape(unit.rule, number, len(unit.holders)) for unit, number in theirs]
            sizes = [shape.numel() for shape in shapes]
            if source == dist.get_rank():
                flat = torch.cat(
                    [self._parameter[key_of(unit)].detach().flatten() for unit, _ in theirs]
                )
            else:
                flat = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=self._device)
            if self.group.size() > 1:
                dist.broadcast(flat, src=source, group=self.group)
            for (unit, number), part, shape in zip(theirs, flat.split(sizes), shapes, strict=True):
                shards[key_of(unit), number] = part.view(shape)
        return [
            [shards[key_of(unit), number] for number in range(len(unit.holders))] for unit in bucket
        ]
