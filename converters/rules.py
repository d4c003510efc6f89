"""A rule maps every shard of one Megatron tensor to Hugging Face tensors; both directions of
conversion follow from it.
A fused or sharded tensor is a list of segments along one axis: "rows 0 to 8 of the first HF tensor,
then rows 0 to 4 of the second, ...". The shard of each rank has its own list. Loading concatenates
the segments; exporting copies them back. Weights are [out, in] in both formats, and both arrange
the halves of rotary embeddings alike, so nothing is ever transposed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rftmega.core.errors import WeightMismatch


class Segment(NamedTuple):
    """Segment is a range of rows or columns, from `start` to `stop`, of one of a rule's parts.

    A part is an HF tensor or, if an HF tensor fuses several (such as q, k and v), one of these
    components; `part` is its index. Part -1 is padding: zeros that no HF tensor contains.
    """

    part: int
    start: int
    stop: int


class HFTensor(NamedTuple):
    """HFTensor is the name and shape of a tensor as stored by Hugging Face; the name may contain
    {layer} and {expert}.
    """

    name: str
    shape: tuple[int, ...]


class Sliceable(Protocol):
    """Sliceable is a tensor, or a safetensors slice that reads only the requested elements."""

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor: ...


@dataclass(frozen=True)
class Rule:
    """Rule describes one Megatron tensor, such as the fused QKV weight of a layer, and the HF
    tensors that it consists of.

    One rule stands for the tensors of all layers and experts: in names, {layer} and {expert} are
    local indices for Megatron and global ones for HF.
    """

    # candidate names: the local spec's and Transformer Engine's; a module has exactly one of them
    megatron: tuple[str, ...]
    hf: tuple[HFTensor, ...]
    # False: a copy of a tensor that another rule exports
    exported: bool = field(default=True, kw_only=True)
    # without it in a folder the parameter keeps its initial value
    optional: bool = field(default=False, kw_only=True)
    # layers that it applies to; None: all
    layers: frozenset[int] | None = field(default=None, kw_only=True)
    # rows of the parts that the first HF tensor concatenates; each further tensor is one part, and
    # so is the first if this is empty
    fused: tuple[int, ...] = field(default=(), kw_only=True)

    axis = 0

    def __post_init__(self) -> None:
        assert not self.fused or sum(self.fused) == self.hf[0].shape[0]

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.hf[0].name

    @property
    def per_expert(self) -> bool:
        """Returns whether the rule is about tensors of routed experts, of which each expert has its
        own. These tensors are sharded over expert-tensor-parallel processes.
        """
        return "{expert}" in self.hf[0].name

    @property
    def opens(self) -> bool:
        """Returns whether the first pipeline stage holds the tensor, like the embedding; other
        tensors without a layer number are on the last stage.
        """
        return self.megatron[0].startswith(("embedding.", "visual."))

    def speaks_of(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def hf_names(self, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
        return tuple(tensor.name.format(layer=layer, expert=expert) for tensor in self.hf)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the length, along the sharded axis, of each part: an HF tensor, or a component of
        a fused one.
        """
        alone = self.hf[1:] if self.fused else self.hf
        return self.fused + tuple(tensor.shape[self.axis] for tensor in alone)

    def segments(self, rank: int, ranks: int) -> list[Segment]:
        """Returns the ranges of HF tensors that form, concatenated, the Megatron tensor of rank
        `rank` of `ranks` (tensor-parallel) ranks.

        Raises WeightMismatch if the tensor can't be split equally.
        """
        return [self.stored(segment) for segment in self.cut(rank, ranks)]

    def cut(self, rank: int, ranks: int) -> list[Segment]:
        """Returns the segments that form the Megatron tensor of rank `rank` of `ranks`; unlike
        `segments`, it counts the components of a fused HF tensor as separate parts.
        """
        raise NotImplementedError

    def stored(self, segment: Segment) -> Segment:
        """Converts a segment of a component of a fused HF tensor to the corresponding segment of
        the whole HF tensor; any other segment is returned unchanged.
        """
        part, start, stop = segment
        if not self.fused or part < 0:
            return segment
        if (further := part - len(self.fused)) >= 0:
            return Segment(1 + further, start, stop)
        before = sum(self.fused[:part])
        return Segment(0, before + start, before + stop)


@dataclass(frozen=True)
class Replicated(Rule):
    """Replicated is the rule of a tensor that every rank holds in full."""

    def cut(self, rank: int, ranks: int) -> list[Segment]:
        return [Segment(0, 0, self.sizes[0])]


@dataclass(frozen=True)
class Column(Rule):
    """Column is the rule of a column-parallel linear layer, [out, in] split along out: rank r holds
    the r-th block of each part.

    With two parts, gate and up, a shard is the block of gate, then the block of up. `narrow`:
    rollout engines hold the whole tensor on every rank.
    """

    narrow: bool = field(default=False, kw_only=True)

    def cut(self, rank: int, ranks: int) -> list[Segment]:
        return [self._block(part, rank, ranks) for part in range(len(self.sizes))]

    def _block(self, part: int, rank: int, ranks: int) -> Segment:
        size = self.sizes[part]
        if size % ranks:
            held = self.hf[self.stored(Segment(part, 0, 0)).part]
            raise WeightMismatch(
                f"{held.name} {held.shape} can't be split along axis {self.axis} over {ranks} ranks."
            )
        block = size // ranks
        return Segment(part, rank * block, (rank + 1) * block)


@dataclass(frozen=True)
class Row(Column):
    """Row is the rule of a row-parallel linear layer: rank r holds the r-th block of columns."""

    axis = 1


@dataclass(frozen=True)
class Vocabulary(Rule):
    """Vocabulary is the rule of an embedding or LM head whose rows, one per vocabulary entry, are
    split into blocks.
    The last blocks end with zero rows, which pad the vocabulary to a multiple of the number of
    ranks.
    """

    def cut(self, rank: int, ranks: int) -> list[Segment]:
        size = self.sizes[0]
        block = padded_vocabulary(size, ranks) // ranks
        start, stop = (min(edge, size) for edge in (rank * block, (rank + 1) * block))
        padding = block - (stop - start)
        held = [Segment(0, start, stop)] if stop > start else []
        return held + ([Segment(-1, 0, padding)] if padding else [])


@dataclass(frozen=True)
class VocabularyColumns(Vocabulary):
    """VocabularyColumns is the rule of a matrix [rank, vocabulary] whose columns are split like the
    vocabulary: the matrix of an embedding's LoRA adapter that is looked up by token.
    """

    axis = 1


@dataclass(frozen=True)
class QKV(Rule):
    """QKV is the rule of the fused query, key and value projection, weight or bias, which Megatron
    interleaves by query group: [q.. k v | q.. k v | ...].

    A shard is a contiguous block of these rows. With fewer groups than ranks it contains part of a
    group, as in Megatron. `groups`: number of query groups (key-value heads).
    """

    groups: int = field(kw_only=True)

    def cut(self, rank: int, ranks: int) -> list[Segment]:
        total = sum(self.sizes)
        if total % ranks:
            raise WeightMismatch(
                f"{self.hf[0].name} and its siblings have {total} rows, which {ranks} ranks can't share equally."
            )
        return list(_clip(self._whole(), rank * total // ranks, (rank + 1) * total // ranks))

    def _whole(self) -> list[Segment]:
        """Returns the segments of the tensor of a single rank."""
        steps = [size // self.groups for size in self.sizes]
        return [
            Segment(part, g * step, (g + 1) * step)
            for g in range(self.groups)
            for part, step in enumerate(steps)
        ]


@dataclass(frozen=True)
class GatedQKV(QKV):
    """GatedQKV is the rule of a QKV projection that also computes a gate of each head's output;
    Hugging Face's query tensor has the rows of a head's query, then those of its gate, and
    Megatron's query group those of all its queries, then of all its gates.

    `heads`: number of attention heads.
    """

    heads: int = field(kw_only=True)

    def _whole(self) -> list[Segment]:
        queries, step = self.sizes[0], self.sizes[1] // self.groups
        width = queries // self.heads // 2
        several = self.heads // self.groups
        found = []
        for group in range(self.groups):
            starts = [2 * width * head for head in range(group * several, (group + 1) * several)]
            found += [Segment(0, start, start + width) for start in starts]
            found += [Segment(0, start + width, start + 2 * width) for start in starts]
            found += [Segment(part, group * step, (group + 1) * step) for part in (1, 2)]
        return found


def instances(
    rules: Sequence[Rule], *, layers: int, experts: int
) -> Iterator[tuple[Rule, int | None, int | None]]:
    """Yields (rule, layer, expert) for every Megatron tensor of a model; layer or expert, an index,
    is None if the tensor belongs to none.

    `layers`, `experts`: numbers of layers and routed experts of the model.
    """
    for rule in rules:
        for layer in filter(rule.speaks_of, range(layers)) if rule.per_layer else [None]:
            yield from (
                (rule, layer, expert) for expert in (range(experts) if rule.per_expert else [None])
            )


def padded_vocabulary(size: int, ranks: int) -> int:
    """Returns the number of embedding rows, `size`, rounded up to a multiple of `ranks`, the number
    of tensor-parallel ranks.
    """
    return -(-size // ranks) * ranks


def shard(rule: Rule, parts: Sequence[Sliceable], rank: int, ranks: int) -> Tensor:
    """Returns the Megatron tensor of rank `rank` of `ranks`, built from `parts`, the HF tensors of
    the rule, of which only the needed rows or columns are read.
    """
    pieces: list[Tensor] = []
    padding = 0
    for part, start, stop in rule.segments(rank, ranks):
        if part < 0:
            padding = stop - start
        else:
            pieces.append(
                parts[part][(slice(None), slice(start, stop)) if rule.axis else slice(start, stop)]
            )
    if padding:
        like = pieces[0] if pieces else parts[0][0:1]
        shape = list(rule.hf[0].shape)
        shape[rule.axis] = padding
        pieces.append(like.new_zeros(shape))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, rule.axis)


def assemble(rule: Rule, shards: Sequence[Tensor], *, alias: bool = False) -> tuple[Tensor, ...]:
    """Returns the rule's HF tensors without padding, built from `shards`, the Megatron tensors of
    all ranks in order: the inverse of `shard`.

    With `alias`, an HF tensor that is contiguous in one shard is returned as a view of the shard.
    """
    parts: list[Tensor | None] = [None] * len(rule.hf)
    replicas = shards[:1] if isinstance(rule, Replicated) else shards
    for rank, held in enumerate(replicas):
        for (part, start, stop), offset in located(rule, rank, len(shards)):
            piece = held.narrow(rule.axis, offset, stop - start)
            if alias and piece.shape == rule.hf[part].shape:
                parts[part] = piece
                continue
            if (whole := parts[part]) is None:
                whole = parts[part] = held.new_empty(rule.hf[part].shape)
            whole.narrow(rule.axis, start, stop - start).copy_(piece)
    return tuple(part for part in parts if part is not None)


def located(rule: Rule, rank: int, ranks: int) -> Iterator[tuple[Segment, int]]:
    """Yields (segment, offset) for the parts of HF tensors in the shard of rank `rank` of `ranks`:
    the range of the HF tensor, and the row or column of the shard where it begins.
    """
    offset = 0
    for segment in rule.segments(rank, ranks):
        if segment.part >= 0:
            yield segment, offset
        offset += segment.stop - segment.start


def _clip(segments: Sequence[Segment], start: int, stop: int) -> Iterator[Segment]:
    """Yields the portions of `segments` that lie between positions `start` and `stop` of their
    concatenation.
    """
    position = 0
    for part, low, high in segments:
        first, last = max(start, position), min(stop, position + high - low)
        if first < last:
            yield Segment(part, low + first - position, low + last - position)
        position += high - low


def shard_shape(rule: Rule, rank: int, ranks: int) -> torch.Size:
    """Returns the shape of the Megatron tensor of rank `rank` of `ranks`."""
    shape = list(rule.hf[0].shape)
    shape[rule.axis] = sum(stop - start for _, start, stop in rule.segments(rank, ranks))
    return torch.Size(shape)
