"""Determines which blocks of the policy's tensors the engines read and which blocks must be sent:
once, identically on every process.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from rftmega.core.errors import EngineError
from rftmega.core.shards import Box, LogicalTensor, disjoint, whole
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.weights.plan import Balance, RankNeeds, Transfer
from rftmega.weights.slices import planned

Needs = dict[str, list[Box]]  # HF name -> boxes that an engine reads, which do not overlap


def needs_of(asked: Mapping[str, Sequence[Box]]) -> Needs:
    """Returns which blocks (boxes) of each HF tensor an engine needs, without overlaps. `asked`:
    the blocks that the engine's loader has read, by HF name; these may overlap.
    """
    return {name: disjoint(boxes) for name, boxes in asked.items()}


def everybodys(needs: Needs) -> tuple[list[Needs], list[int]]:
    """Gathers the needs of all processes' engines, i.e. the blocks of each HF tensor that an engine
    reads; a collective. Returns the distinct needs, and for each process the index of its needs
    among these. Each distinct value is sent only once.
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
    buckets: Sequence[list[LogicalTensor]], kinds: Sequence[Needs], kind_of: Sequence[int]
) -> Iterator[Iterator[Transfer]]:
    """Yields, for each of `buckets` (tensors that are sent together), an iterator over the
    transfers of slices between ranks. Read the iterators in order: the choice of a sender depends
    on the transfers before.

    `kinds`: the distinct needs of engine ranks; `kind_of`: for each rank, the index of its needs in
    `kinds`. Identical layers are planned only once.
    """
    balance = Balance()
    shared: dict[Any, RankNeeds] = {}

    def moves(tensors: list[LogicalTensor]) -> Iterator[Transfer]:
        for tensor in tensors:
            of_kind = tuple(_needed(tensor, needs) for needs in kinds)
            if of_kind not in shared:
                shared[of_kind] = tuple((rank, of_kind[kind]) for rank, kind in enumerate(kind_of))
            yield from balance.transfers(tensor, shared[of_kind])

    return map(moves, buckets)


def _needed(tensor: LogicalTensor, needs: Needs) -> tuple[tuple[int, Box], ...]:
    found = []
    for number, name in enumerate(tensor.names):
        found += [(number, box) for box in needs.get(name, [])]
    return tuple(found)


def refuse_unread(tensors: Sequence[LogicalTensor], kinds: Sequence[Needs]) -> None:
    """Raises EngineError unless every element of the policy's tensors is read by some engine rank.
    `kinds`: the distinct needs of engine ranks.
    """
    for name, _, shape in planned(tensors):
        read = disjoint(box for needs in kinds for box in needs.get(name, []))
        if read != [whole(shape)]:
            raise EngineError(
                f"No engine reads all of {name} {tuple(shape)}, which the policy has: only {read} of it."
            )
