"""Describes Megatron shards as blocks of Hugging Face tensors, derived from the conversion rules."""

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
    """Returns the description (names, shapes, dtype) of the HF tensors that a rule lists, for one
    layer and expert.

    `holders`: for each distinct shard, its blocks of these HF tensors and the global ranks that
    hold it.
    """
    names = rule.hf_names(layer, expert)
    kind, opens = rule.megatron[0], rule.opens
    return LogicalTensor(names, shapes_of(rule), dtype, layer, expert, kind, opens, holders)


@lru_cache(maxsize=4096)
def shapes_of(rule: Rule) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a rule's HF tensors; cached, so that all layers share one object."""
    return tuple(tuple(tensor.shape) for tensor in rule.hf)


@lru_cache(maxsize=65536)
def shard_parts(rule: Rule, rank: int, ranks: int) -> tuple[ShardPart, ...]:
    """Returns the blocks of HF tensors that the Megatron tensor of rank `rank` of `ranks` consists
    of, each with its offset in this tensor; cached, so that all layers share one object.

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
    """Returns the blocks of HF tensors that the Megatron tensor of rank `rank` of `ranks` consists
    of, each as (index of the HF tensor, start and stop along each dimension).
    """
    return tuple((part.number, part.box) for part in shard_parts(rule, rank, ranks))


def segment_box(rule: Rule, segment: Segment) -> Box:
    """Converts a segment, a range along the sharded axis, to a block (box) of the HF tensor: start
    and stop along each dimension.
    """
    box = list(whole(rule.hf[segment.part].shape))
    box[rule.axis] = (segment.start, segment.stop)
    return tuple(box)
