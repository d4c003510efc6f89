"""Simulates a weight push message by message, without processes, to predict its buffers and
traffic.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from rftmega.config import RunConfig
from rftmega.converters import Rule
from rftmega.core.shards import LogicalTensor
from rftmega.model_providers.description import ModelDescription
from rftmega.run.planning.engine import weight_bytes
from rftmega.run.planning.models import PlannedModel
from rftmega.run.planning.push_plan import Engines, Placement, placements
from rftmega.run.planning.states import BUFFERS
from rftmega.weights.engine_needs import needed_boxes
from rftmega.weights.message import message_bytes
from rftmega.weights.needs import Needs, planned_moves
from rftmega.weights.slices import TensorSlice, buckets_of, in_order
from rftmega.weights.transports.shared_weights import SEGMENTS, segment_bytes

DTYPES = {4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}  # by bytes per weight


class Push(NamedTuple):
    """Push is the predicted cost of one weight push: the memory of its buffers on each process, and
    the bytes sent between each two processes.
    """

    buffers: list[int]  # peak bytes of messages on each process
    sent: dict[tuple[int, int], int]  # (sending process, receiving process) -> bytes
    share: float  # share of the model's bytes that was simulated


MOST = 200_000  # moves up to which a push is simulated in full; otherwise only some layers are


def push_buffers(planned: PlannedModel, config: RunConfig, world: int) -> list[int]:
    """Returns the peak bytes of the buffers of a weight push on each of `world` trainer processes.

    With separate engines, these are the bytes of the shared memory that all processes map.
    """
    bucket_bytes = config.trainer.push_bucket_mib * 2**20
    layers = sampled(planned.model, world)
    if config.strategy == "separate":
        tensors = [placed.tensor for placed in tensors_of_plan(planned, world, 1, layers)]
        return [SEGMENTS * segment_bytes(tensors, bucket_bytes)] * world
    # vLLM is always split in this way; other engines read everything.
    return push_of(planned, world, config.rollout.tensor, bucket_bytes, layers=layers).buffers


def sampled(model: ModelDescription, world: int) -> set[int] | None:
    """Returns the indices of one dense and one MoE layer (if the model has both kinds) to simulate
    if a simulation of all layers on `world` processes would take too long; None: simulate all
    layers.
    """
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
    """Simulates a weight push from `world` trainer processes into colocated engines of
    `engine_tensor` processes each, which load weights as vLLM does.

    `bucket_bytes`: bytes of the tensors that are sent at a time; `layers`: indices of the layers to
    simulate; None: all.
    """
    if planned.groups is not None:
        return _of_rows(planned, world, engine_tensor, bucket_bytes)
    placed = tensors_of_plan(planned, world, engine_tensor, layers)
    tensors = [each.tensor for each in placed]
    kinds = [_needs(placed, rank, engine_tensor) for rank in range(engine_tensor)]
    kind_of = [rank % engine_tensor for rank in range(world)]
    return simulated(tensors, kinds, kind_of, bucket_bytes, planned.model, alone=layers is not None)


def _of_rows(planned: PlannedModel, world: int, engine_tensor: int, bucket_bytes: int) -> Push:
    """Returns an upper bound of the cost of a push of a model on FSDP2: every process of a replica
    sends its rows of two buckets while it receives the rows of the other processes. Arguments as of
    `push_of`.
    """
    shards = world // planned.parallel.replicas
    read = weight_bytes(planned, engine_tensor, planned.itemsize)
    sent = {
        (first + source, first + target): read // shards
        for first in range(0, world, shards)
        for source in range(shards)
        for target in range(shards)
        if source != target
    }
    return Push([bound_of(planned, engine_tensor, bucket_bytes)] * world, sent, 1.0)


def bound_of(planned: PlannedModel, engine_tensor: int, bucket_bytes: int) -> int:
    """Returns an approximate upper bound of the bytes of a push's buffers on one process: two
    buckets received and two sent, each with the share of one of an engine's `engine_tensor`
    processes. A bucket has `bucket_bytes`, or all experts of a layer, however many they are.
    """
    experts = planned.model.experts
    if experts:
        whole = 3 * planned.model.hidden * experts.ffn * experts.number * planned.itemsize
        bucket_bytes = max(bucket_bytes, whole)
    return 4 * bucket_bytes // engine_tensor


def simulated(
    tensors: Sequence[LogicalTensor],
    kinds: Sequence[Needs],
    kind_of: Sequence[int],
    bucket_bytes: int,
    model: ModelDescription,
    *,
    alone: bool = False,
) -> Push:
    """Simulates the messages of a push of `tensors` in buckets of `bucket_bytes`.

    `kinds`: for each rank of an engine, the slices of HF tensors that it reads; `kind_of`: for each
    process, its engine rank (index in `kinds`); `alone`: only some layers of `model` are simulated,
    so each bucket stands for many equal consecutive buckets.
    """
    world = len(kind_of)
    most = [0] * world
    sent: dict[tuple[int, int], int] = defaultdict(int)
    # A bucket travels while the one before it is loaded, and the loader still holds the last tensor
    # of the one before that.
    before, tail, tail_before = [0] * world, [0] * world, [0] * world
    buckets = buckets_of(tensors, bucket_bytes, for_an_engine=True)
    for bucket, moves in zip(buckets, planned_moves(buckets, kinds, kind_of), strict=True):
        pairs: dict[tuple[int, int], list[TensorSlice]] = defaultdict(list)
        for source, target, part in moves:
            pairs[source, target].append(part)
            sent[source, target] += part.bytes
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
    looked_at = sum(tensor.bytes for tensor in tensors)
    return Push(
        most, dict(sent), min(1.0, looked_at / (model.parameters * tensors[0].dtype.itemsize))
    )


def _messages(
    pairs: dict[tuple[int, int], list[TensorSlice]], tensor: LogicalTensor, world: int
) -> tuple[list[int], list[int]]:
    """Returns two lists over the `world` processes, for the messages of one bucket: the bytes of
    all messages that a process sends or receives, and of the received messages that contain the
    last HF tensor of `tensor`.

    `pairs`: (source, target) -> slices that are sent.
    """
    held, last = [0] * world, [0] * world
    # processes that need the same slices share one message of a sender
    alike: set[tuple[int, tuple[TensorSlice, ...]]] = set()
    end = len(tensor.names) - 1
    for (source, target), slices in pairs.items():
        size = message_bytes([each.bytes for each in slices])
        held[target] += size
        if any(each.tensor is tensor and each.number == end for each in slices):
            last[target] += size
        key = source, tuple(slices)
        if key not in alike:
            alike.add(key)
            held[source] += size
    return held, last


def tensors_of_plan(
    planned: PlannedModel, world: int, engine_tensor: int, layers: Collection[int] | None = None
) -> list[Placement]:
    """Returns the tensors of a push in the model's order, each with the processes that hold and
    that need slices of it.

    `engine_tensor`: processes of an engine; `layers`: indices of the layers to include; None: all.
    """

    def dtype(rule: Rule) -> torch.dtype:
        return torch.float32 if rule.megatron[0].endswith(BUFFERS) else DTYPES[planned.itemsize]

    found = placements(
        planned.rules,
        planned.model,
        planned.parallel,
        world,
        Engines(world, engine_tensor),
        colocated=True,
        dtype=dtype,
        narrow_whole=planned.narrow_whole,
        layers=layers,
    )
    of_tensor = {placement.tensor: placement for placement in found}
    return [of_tensor[tensor] for tensor in in_order(list(of_tensor))]


def _needs(placed: Sequence[Placement], rank: int, ranks: int) -> Needs:
    asked: Needs = defaultdict(list)
    for rule, tensor, _ in placed:
        for number, box in needed_boxes(rule, rank, ranks):
            asked[tensor.names[number]].append(box)
    return asked
