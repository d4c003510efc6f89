"""Shards describe which blocks of Hugging Face tensors a process holds of a model, independent of
the training backend.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

SCALES = "_scale_inv"  # suffix of an FP8 weight's scales, by which it is multiplied
# the linear layers of attention and MLP, by the last part of their names
LINEAR = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("w1", "w2", "w3"),  # of Mixtral's experts
)
EMBEDDING, HEAD = OF_VOCABULARY = ("embed_tokens", "lm_head")  # embedding and LM head
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by itemsize
Box = tuple[tuple[int, int], ...]  # start and stop along each dimension
Holding = tuple[tuple[int, Box], ...]  # (number of the HF tensor, box of it), of one shard


@dataclass(frozen=True, slots=True, eq=False)
class LogicalTensor:
    """LogicalTensor is one or several HF tensors of the whole model that are transferred together,
    such as q, k and v.

    LogicalTensors are compared by identity, not by content.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    layer: int | None = None
    expert: int | None = None
    kind: str = ""  # equal for the corresponding tensors of other layers and experts
    opens: bool = False  # precedes the layers, as the embedding does
    # each shard's content, and the processes (global ranks) that hold it; (): not known yet
    holders: tuple[tuple[Holding, tuple[int, ...]], ...] = ()

    @property
    def bytes(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes) * self.dtype.itemsize


class ShardPart(NamedTuple):
    """ShardPart is a block (box) of an HF tensor and the block's offset in the shard's local
    tensor.
    """

    number: int  # index of the HF tensor in LogicalTensor.names
    box: Box
    offset: tuple[int, ...]


class Addend(Protocol):
    """Addend is a tensor that is added to a shard's tensor when the shard is read, such as a LoRA
    adapter's product.
    """

    def of(self, box: Box) -> Tensor:
        """Returns the addend of a block (box) of the shard's local tensor, in float32."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard is a local tensor of this process with the blocks (boxes) of Hugging Face tensors that
    it holds; elements outside these blocks are padding.
    """

    logical: LogicalTensor
    parts: tuple[ShardPart, ...]
    tensor: Tensor
    addend: Addend | None = None

    def views(self, number: int) -> Iterator[tuple[Box, Tensor]]:
        """Yields each block (box) of HF tensor `number` in this shard, with its elements: a view,
        or a newly computed tensor if there is an addend.
        """
        for part in self.parts:
            if part.number == number:
                yield part.box, self.elements(part)

    def elements(self, part: ShardPart) -> Tensor:
        """Returns the elements of one block: a view, or a newly computed tensor if there is an
        addend.
        """
        ends = zip(part.offset, shape_of(part.box), strict=True)
        local = tuple((start, start + size) for start, size in ends)
        view = narrowed(self.tensor.detach(), local)
        if self.addend is None:
            return view
        return (view.float() + self.addend.of(local)).to(view.dtype)

    def rounding(self) -> Tensor:
        """Returns [2] float64: the sum of squares of the rounding error that merging the addend
        into the weight makes, and the sum of squares of the addend.
        """
        found = torch.zeros(2, dtype=torch.float64)
        for part in self.parts if self.addend is not None else ():
            assert self.addend is not None
            ends = zip(part.offset, shape_of(part.box), strict=True)
            local = tuple((start, start + size) for start, size in ends)
            view, added = narrowed(self.tensor.detach(), local), self.addend.of(local)
            kept = self.elements(part).float() - view.float()
            found[0] += (kept - added.to(kept)).double().square().sum().cpu()
            found[1] += added.double().square().sum().cpu()
        return found


@dataclass(frozen=True, slots=True)
class TrainedAdapters:
    """TrainedAdapters holds this process's shards of a model's LoRA adapters and their scale: a
    weight becomes weight + alpha / rank x B x A, with `rslora` weight + alpha / sqrt(rank) x B x A.

    `head`: shards of a value head, which is trained in full in addition to the adapters.
    """

    shards: tuple[Shard, ...]
    rank: int
    alpha: float
    dropout: float
    rslora: bool = False
    head: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """AdapterSource is the source of the adapters in a weight sync that sends only adapters: this
    process's shards of them (`held`) and the process group over which all shards are gathered
    (`group`).
    """

    held: TrainedAdapters
    group: Any  # the processes of a replica of the model


@dataclass(frozen=True, slots=True)
class ShardBox:
    """ShardBox is a block (box) of one tensor of the training state that this process holds.

    Keys and shapes are the same under every parallel layout, so a checkpoint of one layout can be
    read under another layout.
    """

    key: str  # "weights/...", "average/...", "main/...", "exp_avg/...": kind, and name in the model
    shape: tuple[int, ...]  # of the whole tensor
    padded: bool  # its number of rows depends on the layout; the additional rows are zeros
    offset: tuple[int, ...]  # of the box in it
    tensor: Tensor  # the box, a view
    written: bool  # this process writes it, not another that holds the same box


@torch.no_grad()
def lost_share(shards: Iterable[Shard], everyones: Callable[[Tensor], Tensor]) -> float:
    """Returns the share of the adapters' update that is lost when merged weights are rounded:
    |error| / |addend|, 0 if there is no addend. `shards`: the shards of this process; `everyones`
    sums a tensor over all processes.
    """
    own = sum((shard.rounding() for shard in shards), torch.zeros(2, dtype=torch.float64))
    lost, added = everyones(own).tolist()
    return math.sqrt(lost / added) if added else 0.0


def is_linear(name: str) -> bool:
    """Returns whether an HF tensor is the weight of a linear layer of attention or MLP."""
    return name.endswith(tuple(f".{layer}.weight" for layer in LINEAR))


def whole(shape: Sequence[int]) -> Box:
    """Returns the block (box: start and stop along each dimension) that covers a whole tensor of
    this shape.
    """
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


@lru_cache(1 << 16)  # planning a push asks for the same boxes for every process
def volume(box: Box) -> int:
    """Returns the number of elements of a block (box: start and stop along each dimension)."""
    return math.prod(shape_of(box))


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """Returns a view of the tensor's elements within a block (box: start and stop along each
    dimension).
    """
    for dim, (start, stop) in enumerate(box):
        if (start, stop) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def within(box: Box, outer: Box) -> Box:
    """Returns the coordinates of `box` relative to the start of the block `outer`, which contains
    it.
    """
    edges = zip(box, outer, strict=True)
    return tuple((start - first, stop - first) for (start, stop), (first, _) in edges)


def intersection(one: Box, other: Box) -> Box | None:
    """Returns the intersection of two blocks (boxes: start and stop along each dimension), or None
    if it is empty.
    """
    found = []
    for (start, stop), (first, last) in zip(one, other, strict=True):
        low, high = max(start, first), min(stop, last)
        if low >= high:
            return None
        found.append((low, high))
    return tuple(found)


def without(box: Box, other: Box) -> list[Box]:
    """Returns disjoint blocks (boxes) that together cover the elements of `box` outside `other`."""
    common = intersection(box, other)
    if common is None:
        return [box]
    found = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, common, strict=True)):
        for first, last in ((start, low), (high, stop)):
            if first < last:
                found.append((*common[:dim], (first, last), *box[dim + 1 :]))
    return found


def disjoint(boxes: Iterable[Box]) -> list[Box]:
    """Returns disjoint blocks (boxes) that cover the same elements as `boxes`, which may overlap;
    adjacent blocks are merged.
    """
    found: list[Box] = []
    for box in sorted(set(boxes)):
        if volume(box):
            found += remaining(box, found)
    return _joined(found)


def remaining(box: Box, taken: Iterable[Box]) -> list[Box]:
    """Returns disjoint blocks (boxes) that together cover the elements of `box` outside all blocks
    of `taken`.
    """
    left = [box]
    for other in taken:
        left = [rest for piece in left for rest in without(piece, other)]
    return left


def _joined(boxes: list[Box]) -> list[Box]:
    """Merges boxes that are adjacent along one dimension until no more can be merged."""
    before = len(boxes) + 1
    while len(boxes) < before:
        before = len(boxes)
        for dim in range(len(boxes[0]) if boxes else 0):
            boxes = _joined_along(boxes, dim)
    return sorted(boxes)


def _joined_along(boxes: list[Box], dim: int) -> list[Box]:
    found: list[Box] = []
    for box in sorted(boxes, key=lambda each: (each[:dim], each[dim + 1 :], each[dim])):
        last = found[-1] if found else None
        alike = last and last[:dim] == box[:dim] and last[dim + 1 :] == box[dim + 1 :]
        if last and alike and last[dim][1] == box[dim][0]:
            found[-1] = (*box[:dim], (last[dim][0], box[dim][1]), *box[dim + 1 :])
        else:
            found.append(box)
    return found


def as_integers(elements: Tensor) -> Tensor:
    """Returns a view of elements of any dtype as integers of their size."""
    return elements.view(INTEGERS[elements.itemsize])
