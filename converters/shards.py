"""Megatron shards in terms of Hugging Face tensors, derived from the table's rules."""

from functools import lru_cache

import torch

from rftmega.converters.rules import Rule, Segment, located
from rftmega.core.shards import Box, Holding, LogicalTensor, ShardPart, whole


def logical_tensor(
    rule: Rule,
    layer: int | None,
    expert: int | None,
    dtype: torch.dtype,
    holders: tuple[tuple[Holding, tuple[int, ...]], ...] = (),
) -> LogicalTensor:
    """Returns the HF tensors of a rule for a layer and expert."""
    names = rule.hf_names(layer, expert)
    kind, opens = rule.megatron[0], rule.opens
    return LogicalTensor(names, shapes_of(rule), dtype, layer, expert, kind, opens, holders)


@lru_cache(maxsize=4096)
def shapes_of(rule: Rule) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a rule's HF tensors: one object for all layers."""
    return tuple(tuple(tensor.shape) for tensor in rule.hf)


@lru_cache(maxsize=65536)
def shard_parts(rule: Rule, rank: int, ranks: int) -> tuple[ShardPart, ...]:
    """Returns the contents of shard `rank` of `ranks` of a rule's tensor: one object for all
    layers.

    Raises WeightMismatch if the tensor cannot be split equally.
    """
    found = []
    for segment, at in located(rule, rank, ranks):
        box = segment_box(rule, segment)
        offset = tuple(at if dim == rule.axis else 0 for dim in range(len(box)))
        found.append(ShardPart(segment.part, box, offset))
    return tuple(found)


@lru_cache(maxsize=65536)
def holding(rule: Rule, rank: int, ranks: int) -> Holding:
    """Returns only the boxes of `shard_parts`."""
    return tuple((part.number, part.box) for part in shard_parts(rule, rank, ranks))


def segment_box(rule: Rule, segment: Segment) -> Box:
    """Returns a segment of a rule's tensor as a box of the HF tensor."""
    box = list(whole(rule.hf[segment.part].shape))
    box[rule.axis] = (segment.start, segment.stop)
    return tuple(box)
