"""Shards -> whole HF-named tensors on every process of a replica, one bucket at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from converters import Rule, assemble
from converters.hf_folder import Planned
from rftmega.parallel.topology import Topology

Key = tuple[str, int | None, int | None]  # a rule's first Megatron name, layer, expert


class Held(Protocol):
    """What a process holds: shard `rank` of a rule's tensor, at a layer and expert (`megatron.binding.Bound`)."""

    @property
    def rule(self) -> Rule: ...

    @property
    def layer(self) -> int | None: ...

    @property
    def expert(self) -> int | None: ...

    @property
    def rank(self) -> int: ...

    @property
    def parameter(self) -> Tensor: ...


def key_of(item: "Held | Unit") -> Key:
    return item.rule.megatron[0], item.layer, item.expert


@dataclass(frozen=True, slots=True)
class Unit:
    """One Megatron tensor of the whole model: a load unit, since its HF tensors (q, k, v) always travel together."""

    rule: Rule
    layer: int | None
    expert: int | None
    dtype: torch.dtype
    shapes: dict[int, tuple[int, ...]]  # global rank that sends a shard -> its shape, in the order of the shards

    @property
    def bytes(self) -> int:
        return sum(torch.Size(tensor.shape).numel() for tensor in self.rule.hf) * self.dtype.itemsize


class Exporter:
    """Iterates over the policy as HF-named tensors. A collective: every process of the replica iterates in step."""

    def __init__(self, held: Sequence[Held], topology: Topology, *, bucket_bytes: int):
        """Learns once, from all processes of the replica, who holds what."""
        self.group = topology.replica_group
        exported = [item for item in held if item.rule.exported]
        self._parameter: dict[Key, Tensor] = {key_of(item): item.parameter for item in exported}
        mine = [
            (item.rule, item.layer, item.expert, item.rank, item.parameter.dtype, tuple(item.parameter.shape))
            for item in exported
        ]
        told: list[Any] = [None] * self.group.size()
        dist.all_gather_object(told, (dist.get_rank(), mine), group=self.group)
        self._device = held[0].parameter.device
        self.buckets = _buckets(_units(told), bucket_bytes)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor), layer by layer, always in the same order."""
        for bucket in self.buckets:
            shards = self._gather(bucket)
            for unit, held in zip(bucket, shards, strict=True):
                yield from zip(unit.rule.hf_names(unit.layer, unit.expert), assemble(unit.rule, held), strict=True)

    @property
    def planned(self) -> list[Planned]:
        """What an iteration will give, in its order."""
        return [
            Planned(name, unit.dtype, tensor.shape)
            for bucket in self.buckets
            for unit in bucket
            for name, tensor in zip(unit.rule.hf_names(unit.layer, unit.expert), unit.rule.hf, strict=True)
        ]

    @property
    def total_bytes(self) -> int:
        return sum(unit.bytes for bucket in self.buckets for unit in bucket)

    @torch.no_grad()
    def _gather(self, bucket: Sequence[Unit]) -> list[list[Tensor]]:
        """Every holder sends its shards of the bucket as one flat tensor; per unit, the shards in their order."""
        shards: dict[tuple[Key, int], Tensor] = {}
        for source in dict.fromkeys(rank for unit in bucket for rank in unit.shapes):
            sent = [unit for unit in bucket if source in unit.shapes]
            sizes = [torch.Size(unit.shapes[source]).numel() for unit in sent]
            if source == dist.get_rank():
                flat = torch.cat([self._parameter[key_of(unit)].detach().flatten() for unit in sent])
            else:
                flat = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=self._device)
            if self.group.size() > 1:
                dist.broadcast(flat, src=source, group=self.group)
            for unit, part in zip(sent, flat.split(sizes), strict=True):
                shards[key_of(unit), source] = part.view(unit.shapes[source])
        return [[shards[key_of(unit), source] for source in unit.shapes] for unit in bucket]


def _units(told: Sequence[tuple[int, list[Any]]]) -> list[Unit]:
    """What all processes said, as units in the order of the model: embedding, layers, norm, head."""
    found: dict[Key, Unit] = {}
    senders: dict[tuple[Key, int], int] = {}
    for rank, mine in told:
        for rule, layer, expert, shard, dtype, shape in mine:
            unit = Unit(rule, layer, expert, dtype, {})
            unit = found.setdefault(key_of(unit), unit)
            # Replicas are equal, of a whole tensor or of a shard: one sends.
            if senders.setdefault((key_of(unit), shard), rank) == rank:
                unit.shapes[rank] = shape
    for (key, _), rank in sorted(senders.items(), key=lambda item: item[0][1]):
        shapes = found[key].shapes
        shapes[rank] = shapes.pop(rank)
    in_layers = sorted((u for u in found.values() if u.layer is not None), key=lambda u: (u.layer, u.expert or 0))
    outside = [u for u in found.values() if u.layer is None]
    first = [u for u in outside if u.rule.opens]
    return first + in_layers + [u for u in outside if not u.rule.opens]


def _buckets(units: Sequence[Unit], bucket_bytes: int) -> list[list[Unit]]:
    """Consecutive units of one dtype up to `bucket_bytes` (a larger unit is a bucket of its own)."""
    buckets: list[list[Unit]] = []
    size = 0
    for unit in units:
        if not buckets or size + unit.bytes > bucket_bytes or unit.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(unit)
        size += unit.bytes
    return buckets
