"""Learns once, from what each process says, which processes hold which shard of which tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from converters import Rule, Segment, located
from converters.hf_folder import PlannedTensor
from rftmega.parallel.collectives import gather_objects

Key = tuple[str, int | None, int | None]  # a rule's first Megatron name, layer, expert


class HeldShard(Protocol):
    """HeldShard is shard `rank` of `ranks` of a rule's tensor, at a layer and expert
    (`megatron.binding.Bound`).
    """

    @property
    def rule(self) -> Rule: ...

    @property
    def layer(self) -> int | None: ...

    @property
    def expert(self) -> int | None: ...

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def parameter(self) -> Tensor: ...


def key_of(item: "HeldShard | Unit") -> Key:
    return item.rule.megatron[0], item.layer, item.expert


@dataclass(frozen=True, slots=True)
class Unit:
    """One Megatron tensor of the whole model: a load unit, since its HF tensors (q, k, v) always
    travel together.
    """

    rule: Rule
    layer: int | None
    expert: int | None
    dtype: torch.dtype
    # shard number -> the processes (global ranks) that hold it
    holders: tuple[tuple[int, ...], ...]

    @property
    def planned(self) -> list[PlannedTensor]:
        """Lists the unit's HF tensors, in the rule's order."""
        names = self.rule.hf_names(self.layer, self.expert)
        return [
            PlannedTensor(name, self.dtype, tensor.shape)
            for name, tensor in zip(names, self.rule.hf, strict=True)
        ]

    @property
    def bytes(self) -> int:
        return (
            sum(torch.Size(tensor.shape).numel() for tensor in self.rule.hf) * self.dtype.itemsize
        )


class Move(NamedTuple):
    """Rows (columns, by the rule's axis) start to stop of a unit's HF tensor `part`."""

    unit: Unit
    part: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return self.unit.planned[self.part].name

    @property
    def shape(self) -> torch.Size:
        shape = list(self.unit.rule.hf[self.part].shape)
        shape[self.unit.rule.axis] = self.stop - self.start
        return torch.Size(shape)

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.unit.dtype.itemsize


class LocalRows(NamedTuple):
    """Rows (columns) start to stop of an HF tensor, present on this process."""

    start: int
    stop: int
    elements: Tensor


class Shards:
    """Shards tells what this process holds of the model, in terms of HF tensors."""

    def __init__(self, held: Sequence[HeldShard]):
        self._held = {key_of(item): item for item in held if item.rule.exported}
        self.device = held[0].parameter.device
        self.generation = 0  # of what is kept
        self._kept: dict[int, tuple[list[Move], list[Tensor]]] = {}
        self._storages: list[int] = []
        self._located: dict[tuple[int, int, int], list[tuple[Segment, int]]] = {}

    def pieces(self, unit: Unit, part: int) -> list[LocalRows]:
        """Returns the pieces of one HF tensor that are here: views of the parameter."""
        item = self._held.get(key_of(unit))
        if item is None:
            return []
        return [
            LocalRows(
                start, stop, item.parameter.detach().narrow(unit.rule.axis, offset, stop - start)
            )
            for (each, start, stop), offset in self._segments(item)
            if each == part
        ]

    def _segments(self, item: HeldShard) -> list[tuple[Segment, int]]:
        """Layers and experts share their rules."""
        key = id(item.rule), item.rank, item.ranks
        if key not in self._located:
            self._located[key] = list(located(item.rule, item.rank, item.ranks))
        return self._located[key]

    def slice_of(self, move: Move) -> Tensor:
        """Returns the elements that a move takes from here: they lie within one piece."""
        for start, stop, elements in self.pieces(move.unit, move.part):
            if start <= move.start and move.stop <= stop:
                return elements.narrow(
                    move.unit.rule.axis, move.start - start, move.stop - move.start
                )
        raise AssertionError(
            f"planned to send {move.name}[{move.start}:{move.stop}], which is not here"
        )

    def slices_of(self, moves: list[Move]) -> list[Tensor]:
        """Returns the elements that each move takes: views, kept by the list that asks, until
        `look_again` finds other memory.
        """
        kept = self._kept.get(id(moves))
        if kept is None or kept[0] is not moves:
            kept = self._kept[id(moves)] = moves, [self.slice_of(move) for move in moves]
        return kept[1]

    def look_again(self) -> None:
        """Forgets the kept views if a parameter was given other memory since (`.data = `); a
        storage that was filled anew, as offloading does, is the same memory.
        """
        storages = [item.parameter.untyped_storage()._cdata for item in self._held.values()]
        if storages != self._storages:
            self._storages = storages
            self._kept.clear()
            self.generation += 1


def units_of(held: Sequence[HeldShard], group: Any = None) -> list[Unit]:
    """Returns every exported tensor that the group (default: all processes) holds between them, in
    the order of the model: embedding, layers, norm, head. A collective; everybody gets the same.
    """
    mine = [
        (item.rule, item.layer, item.expert, item.rank, item.parameter.dtype)
        for item in held
        if item.rule.exported
    ]
    told = gather_objects((dist.get_rank(), mine), group)
    found: dict[Key, tuple[Rule, int | None, int | None, torch.dtype]] = {}
    holders: dict[Key, dict[int, list[int]]] = {}
    for process, theirs in told:
        for rule, layer, expert, shard, dtype in theirs:
            key = rule.megatron[0], layer, expert
            found.setdefault(key, (rule, layer, expert, dtype))
            holders.setdefault(key, {}).setdefault(shard, []).append(process)
    # one object for equal ones, so that what is planned of one holds for all
    alike: dict[Any, tuple[tuple[int, ...], ...]] = {}
    units = []
    for key, what in found.items():
        theirs = tuple(tuple(ranks) for _, ranks in sorted(holders[key].items()))
        units.append(Unit(*what, alike.setdefault(theirs, theirs)))
    return in_order(units)


def in_order(units: Sequence[Unit]) -> list[Unit]:
    """Orders units: embedding, layers with their experts behind the rest of each, norm, head."""
    in_layers = sorted(
        (u for u in units if u.layer is not None),
        key=lambda u: (u.layer, -1 if u.expert is None else u.expert),
    )
    outside = [u for u in units if u.layer is None]
    return (
        [u for u in outside if u.rule.opens] + in_layers + [u for u in outside if not u.rule.opens]
    )


def buckets_of(
    units: Sequence[Unit], bucket_bytes: int, *, for_an_engine: bool = False
) -> list[list[Unit]]:
    """Groups consecutive units of one dtype up to `bucket_bytes`; what is larger by itself is a
    bucket of its own.

    An engine loads the experts of a layer as one: for it they stay together.
    """
    groups: list[list[Unit]] = []
    for unit in units:
        last = groups[-1][-1] if groups else unit
        experts = (
            for_an_engine and None not in (unit.expert, last.expert) and last.layer == unit.layer
        )
        if groups and experts and last.dtype == unit.dtype:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    buckets: list[list[Unit]] = []
    size = 0
    for group in groups:
        bytes_ = sum(unit.bytes for unit in group)
        if not buckets or size + bytes_ > bucket_bytes or group[0].dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1] += group
        size += bytes_
    return buckets
