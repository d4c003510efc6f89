"""Simulates a push of the weights, message by message and without a process: what it keeps in
memory and moves.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from converters import Rule
from converters.rules import Column, Segment
from model_providers.description import ModelDescription
from rftmega.config import RunConfig
from rftmega.planning.models import PlannedModel
from rftmega.planning.push_plan import Engines, placements
from rftmega.planning.states import BUFFERS
from rftmega.weights.message import message_bytes
from rftmega.weights.needs import Needs, planned_moves
from rftmega.weights.plan import engine_needs
from rftmega.weights.shared import SEGMENTS, segment_bytes
from rftmega.weights.units import Move, Unit, buckets_of, in_order

DTYPES = {4: torch.float32, 2: torch.bfloat16}


class Push(NamedTuple):
    """Push holds the cost of one push for every process, by its rank."""

    buffers: list[int]  # bytes of messages, at most
    sent: dict[tuple[int, int], int]  # (source, target) -> bytes
    share: float  # of the model's bytes that were looked at


MOST = 200_000  # moves that are simulated; of a larger push, only some layers are


def push_buffers(planned: PlannedModel, config: RunConfig, world: int) -> list[int]:
    """Returns the bytes of each process at most.

    Of engines beside the trainer, the shared memory that all processes map.
    """
    bucket_bytes = config.trainer.push_bucket_mib * 2**20
    layers = sampled(planned.model, world)
    if config.strategy == "separate":
        units = list(units_of_plan(planned, world, 1, layers))
        return [SEGMENTS * segment_bytes(units, bucket_bytes)] * world
    # Other engines than vLLM, which is never split otherwise, read all.
    return push_of(planned, world, config.rollout.tensor, bucket_bytes, layers=layers).buffers


def sampled(model: ModelDescription, world: int) -> set[int] | None:
    """Returns a layer of each kind, where all are too many to look at; otherwise None."""
    experts = model.experts.layers if model.experts else frozenset()
    each = 2 * model.experts.number if model.experts else 0
    if (model.layers * 8 + len(experts) * each) * world <= MOST:
        return None
    dense = [layer for layer in range(model.layers) if layer not in experts]
    return {*dense[:1], *sorted(experts)[:1]}


def push_of(
    planned: PlannedModel,
    world: int,
    engine_tensor: int,
    bucket_bytes: int,
    *,
    layers: Collection[int] | None = None,
) -> Push:
    """Simulates a push into engines of `engine_tensor` of the trainer's own processes, which load
    as vLLM does. `layers`: only these.
    """
    units = list(units_of_plan(planned, world, engine_tensor, layers))
    kinds = [_needs(units, rank, engine_tensor) for rank in range(engine_tensor)]
    kind_of = [rank % engine_tensor for rank in range(world)]
    return simulated(units, kinds, kind_of, bucket_bytes, planned.model, alone=layers is not None)


def simulated(
    units: Sequence[Unit],
    kinds: Sequence[Needs],
    kind_of: Sequence[int],
    bucket_bytes: int,
    model: ModelDescription,
    *,
    alone: bool = False,
) -> Push:
    """Simulates the plan's messages. `kinds`: what ranks of engines read; `kind_of`: which of these
    each process reads. `alone`: every bucket stands for many that follow each other.
    """
    world = len(kind_of)
    most = [0] * world
    sent: dict[tuple[int, int], int] = defaultdict(int)
    # A bucket travels while the one before it is loaded, and the loader still holds the last tensor
    # of the one before that.
    before, tail, tail_before = [0] * world, [0] * world, [0] * world
    buckets = buckets_of(units, bucket_bytes, for_an_engine=True)
    for bucket, moves in zip(buckets, planned_moves(buckets, kinds, kind_of), strict=True):
        pairs: dict[tuple[int, int], list[tuple[Move, int]]] = defaultdict(list)
        for source, target, move, size in moves:
            pairs[source, target].append((move, size))
            sent[source, target] += size
        held, last = _messages(pairs, bucket[-1], world)
        most = [
            max(peak, sum(alive))
            for peak, *alive in zip(most, tail_before, before, held, strict=True)
        ]
        if alone:
            most = [
                max(peak, 2 * size + end) for peak, size, end in zip(most, held, last, strict=True)
            ]
        before, tail, tail_before = held, last, tail
    looked_at = sum(unit.bytes for unit in units)
    return Push(
        most, dict(sent), min(1.0, looked_at / (model.parameters * units[0].dtype.itemsize))
    )


def _messages(
    pairs: dict[tuple[int, int], list[tuple[Move, int]]], unit: Unit, world: int
) -> tuple[list[int], list[int]]:
    """Returns (bytes of all messages, bytes of received ones that hold the last tensor of `unit`)
    of each process.
    """
    held, last = [0] * world, [0] * world
    # a process sends those that need the same one message
    alike: set[tuple[int, tuple[tuple[int, int, int, int], ...]]] = set()
    end = len(unit.rule.hf) - 1
    for (source, target), moves in pairs.items():
        size = message_bytes([size for _, size in moves])
        held[target] += size
        if any(move.unit is unit and move.part == end for move, _ in moves):
            last[target] += size
        key = source, tuple((id(move.unit), move.part, move.start, move.stop) for move, _ in moves)
        if key not in alike:
            alike.add(key)
            held[source] += size
    return held, last


def units_of_plan(
    planned: PlannedModel, world: int, engine_tensor: int, layers: Collection[int] | None = None
) -> Iterator[Unit]:
    """Yields the units that `weights.units.units_of` learns from processes, in the model's order.

    `layers`: only these.
    """
    found = []
    for placement, layer, expert in placements(
        planned.rules,
        planned.model,
        planned.parallel,
        world,
        Engines(world, engine_tensor),
        colocated=True,
        layers=layers,
    ):
        shards = placement.shards
        if planned.narrow_whole and isinstance(placement.rule, Column) and placement.rule.narrow:
            shards = (tuple(rank for ranks in shards for rank in ranks),)
        dtype = (
            torch.float32
            if placement.rule.megatron[0].endswith(BUFFERS)
            else DTYPES[planned.itemsize]
        )
        found.append(Unit(placement.rule, layer, expert, dtype, shards))
    return iter(in_order(found))


def _needs(units: Sequence[Unit], rank: int, ranks: int) -> Needs:
    asked: Needs = defaultdict(list)
    of_rule: dict[Rule, tuple[Segment, ...]] = {}
    for unit in units:
        if unit.rule not in of_rule:
            of_rule[unit.rule] = engine_needs(unit.rule, rank, ranks)
        names = unit.rule.hf_names(unit.layer, unit.expert)
        for part, start, stop in of_rule[unit.rule]:
            asked[names[part]].append((start, stop))
    return asked
