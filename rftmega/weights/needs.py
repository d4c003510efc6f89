"""Learns what engines read of the policy, and which slices must travel for it: once, the same on
every process.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from converters import Segment
from rftmega.errors import EngineError
from rftmega.parallel.collectives import gather_objects
from rftmega.weights.lazy_tensors import Box
from rftmega.weights.plan import Balance, Placement
from rftmega.weights.units import Move, Unit

# HF name -> rows (columns, by the rule's axis) that an engine reads, from and to
Needs = dict[str, list[tuple[int, int]]]


def needs_of(units: Sequence[Unit], asked: Mapping[str, Sequence[Box]]) -> Needs:
    """Derives the needs from the boxes that a loader read."""
    axes = {
        name: unit.rule.axis
        for unit in units
        for name in unit.rule.hf_names(unit.layer, unit.expert)
    }
    return {name: merged(box[axes[name]] for box in boxes) for name, boxes in asked.items()}


def everybodys(needs: Needs) -> tuple[list[Needs], list[int]]:
    """Gathers (what engines' ranks need, which of these each process needs): engines are alike, so
    each need is told once.
    """
    said = sorted(needs.items())
    digests = gather_objects(hashlib.sha256(repr(said).encode()).digest())
    first = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    kinds = []
    for rank in sorted(first.values()):
        told: list[Any] = [needs]
        dist.broadcast_object_list(told, rank)
        kinds.append(told[0])
    order = {digests[rank]: number for number, rank in enumerate(sorted(first.values()))}
    return kinds, [order[digest] for digest in digests]


def planned_moves(
    buckets: Sequence[list[Unit]], kinds: Sequence[Needs], kind_of: Sequence[int]
) -> Iterator[Iterator[tuple[int, int, Move, int]]]:
    """Yields (source, target, what moves, bytes) of each bucket, to be read one after the other:
    who sends depends on who sent before.

    `kinds`: what ranks of engines need; `kind_of`: which of them each process needs. Layers that
    are alike are cut once.
    """
    balance: dict[torch.dtype, Balance] = {}
    shared: dict[Any, tuple[tuple[int, tuple[Segment, ...]], ...]] = {}

    def moves(units: list[Unit]) -> Iterator[tuple[int, int, Move, int]]:
        for unit in units:
            names = unit.rule.hf_names(unit.layer, unit.expert)
            of_kind = tuple(
                tuple(
                    Segment(part, *range_)
                    for part, name in enumerate(names)
                    for range_ in needed.get(name, [])
                )
                for needed in kinds
            )
            if of_kind not in shared:
                shared[of_kind] = tuple((rank, of_kind[kind]) for rank, kind in enumerate(kind_of))
            plan = balance.setdefault(unit.dtype, Balance(unit.dtype.itemsize))
            for source, target, part, start, stop, size in plan.transfers(
                Placement(unit.rule, unit.holders, shared[of_kind])
            ):
                yield source, target, Move(unit, part, start, stop), size

    return map(moves, buckets)


def refuse_unread(units: Sequence[Unit], kinds: Sequence[Needs]) -> None:
    """Raises EngineError unless every element is read by some engine's rank."""
    for unit in units:
        for name, _, shape in unit.planned:
            read = merged([range_ for needs in kinds for range_ in needs.get(name, [])])
            if read != [(0, shape[unit.rule.axis])]:
                raise EngineError(
                    f"No engine reads all of {name} {tuple(shape)}, which the policy has: only {read} of it."
                )


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges ranges: the same rows in the fewest ranges."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(range_ for range_ in ranges if range_[0] < range_[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found
