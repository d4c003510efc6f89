"""Predicts which slices of the weights a vLLM engine's loader reads, without running an engine."""

from rftmega.converters import Rule
from rftmega.converters.rules import QKV, Column, Segment, Vocabulary
from rftmega.converters.shards import segment_box
from rftmega.core.shards import Box


def needed_boxes(rule: Rule, rank: int, ranks: int) -> tuple[tuple[int, Box], ...]:
    """Returns the slices that tensor-parallel rank `rank` of a vLLM engine with `ranks` ranks loads
    of the HF tensors of `rule`, the conversion rule of one Megatron parameter. A slice is (index of
    the HF tensor within the rule, block (box) of the tensor).
    """
    stored = (rule.stored(each) for each in _needed(rule, rank, ranks))
    return tuple((each.part, segment_box(rule, each)) for each in stored)


def _needed(rule: Rule, rank: int, ranks: int) -> tuple[Segment, ...]:
    """Returns the segments of the HF tensors of `rule` that tensor-parallel rank `rank` of `ranks`
    loads.

    Query heads are split into blocks; key-value heads too, or replicated if there are fewer heads
    than ranks; columns, rows and vocabulary (padded to 64) are split into blocks; all other tensors
    are loaded whole.
    """
    if isinstance(rule, QKV):
        queries, keys, _ = rule.sizes
        group, copies = keys // rule.groups, max(1, ranks // rule.groups)
        width = keys // ranks if rule.groups >= ranks else group
        begin = rank // copies * width
        block = queries // ranks
        both = (Segment(part, begin, begin + width) for part in (1, 2))
        return (Segment(0, rank * block, (rank + 1) * block), *both)
    if isinstance(rule, Vocabulary):
        size = rule.sizes[0]
        block = -(-size // 64) * 64 // ranks
        start, stop = (min(edge, size) for edge in (rank * block, (rank + 1) * block))
        return (Segment(0, start, stop),) if stop > start else ()
    if isinstance(rule, Column) and not rule.narrow:
        return tuple(
            Segment(part, rank * (size // ranks), (rank + 1) * (size // ranks))
            for part, size in enumerate(rule.sizes)
        )
    return tuple(Segment(part, 0, size) for part, size in enumerate(rule.sizes))
