"""Shards describe what a process holds of a model in Hugging Face's terms, whatever backend built it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

SCALES = (
    "_scale_inv"  # behind the name of a weight of 8 bits: its scales, which it is multiplied with
)
# the linear layers of attention and MLP, by the last part of their names
LINEAR = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("w1", "w2", "w3"),  # of Mixtral's experts
)
EMBEDDING, HEAD = OF_VOCABULARY = ("embed_tokens", "lm_head")  # those of words, likewise
Box = tuple[tuple[int, int], ...]  # start and stop along each dimension
Holding = tuple[tuple[int, Box], ...]  # (number of the HF tensor, what of it), of one shard


@dataclass(frozen=True, slots=True, eq=False)
class LogicalTensor:
    """LogicalTensor is HF tensors of the whole model that travel together: q, k and v, or one.

    Two are the same tensor only if they are the same object.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    layer: int | None = None
    expert: int | None = None
    kind: str = ""  # equal for the same tensor of other layers and experts
    opens: bool = False  # comes before the layers, as the embedding does
    # what each shard is, and the processes (global ranks) that hold it; (): not known yet
    holders: tuple[tuple[Holding, tuple[int, ...]], ...] = ()

    @property
    def bytes(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes) * self.dtype.itemsize


class ShardPart(NamedTuple):
    """ShardPart is a box of an HF tensor, and where it lies in the shard's own tensor."""

    number: int  # of the HF tensor among those of the LogicalTensor
    box: Box
    offset: tuple[int, ...]


class Addend(Protocol):
    """Addend is what is added to a shard's tensor where it is read, as an adapter is to a weight."""

    def of(self, box: Box) -> Tensor:
        """Returns what is added to a box of the shard's own tensor, in float32."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard is a tensor of this process and the boxes of HF tensors that it holds; the rest of it is
    padding.
    """

    logical: LogicalTensor
    parts: tuple[ShardPart, ...]
    tensor: Tensor
    addend: Addend | None = None

    def views(self, number: int) -> Iterator[tuple[Box, Tensor]]:
        """Yields the boxes of one HF tensor that are here, and their elements: views, or with an
        addend what was computed now.
        """
        for part in self.parts:
            if part.number == number:
                yield part.box, self.elements(part)

    def elements(self, part: ShardPart) -> Tensor:
        """Returns the elements of a part, as `views` has them."""
        ends = zip(part.offset, shape_of(part.box), strict=True)
        local = tuple((start, start + size) for start, size in ends)
        view = narrowed(self.tensor.detach(), local)
        if self.addend is None:
            return view
        return (view.float() + self.addend.of(local)).to(view.dtype)

    def rounding(self) -> Tensor:
        """Returns [2] float64: the sum of squares of what rounding takes of the addend where it is
        added, and that of the addend.
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
    """TrainedAdapters is what this process holds of a model's adapters, and how these are applied:
    a weight and alpha / rank times the product of its pair, with `rslora` alpha / sqrt(rank) times.
    `head`: the tensors of a value head, which learn whole beside them.
    """

    shards: tuple[Shard, ...]
    rank: int
    alpha: float
    dropout: float
    rslora: bool = False
    head: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """AdapterSource is where a push of adapters finds them."""

    held: TrainedAdapters
    group: Any  # the processes of a replica of the model


@dataclass(frozen=True, slots=True)
class ShardBox:
    """ShardBox is a box of one of the tensors that training goes on from, as this process holds it.

    Keys and shapes are the same under every layout, so a checkpoint of one is read under another.
    """

    key: str  # "weights/...", "average/...", "main/...", "exp_avg/...": kind, and name in the model
    shape: tuple[int, ...]  # of the whole tensor
    padded: bool  # the number of its rows depends on the layout; the rows behind are zeros
    offset: tuple[int, ...]  # of the box in it
    tensor: Tensor  # the box, a view
    written: bool  # by this process, not by another that holds the same


@torch.no_grad()
def lost_share(shards: Iterable[Shard], everyones: Callable[[Tensor], Tensor]) -> float:
    """Returns how much of what adapters add to weights is lost where both are merged and rounded:
    |error| / |addend|, 0 where nothing is added. `everyones` sums a tensor over all processes.
    """
    own = sum((shard.rounding() for shard in shards), torch.zeros(2, dtype=torch.float64))
    lost, added = everyones(own).tolist()
    return math.sqrt(lost / added) if added else 0.0


def is_linear(name: str) -> bool:
    """Returns whether an HF tensor is the weight of a linear layer of attention or MLP."""
    return name.endswith(tuple(f".{layer}.weight" for layer in LINEAR))


def whole(shape: Sequence[int]) -> Box:
    """Returns the box that is a whole tensor."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


@lru_cache(1 << 16)  # a push's plan asks for the same boxes of every process
def volume(box: Box) -> int:
    """Returns the number of elements of a box."""
    return math.prod(shape_of(box))


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """Returns the elements of a tensor within a box: a view."""
    for dim, (start, stop) in enumerate(box):
        if (start, stop) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def within(box: Box, outer: Box) -> Box:
    """Returns a box as seen from the beginning of another one that contains it."""
    edges = zip(box, outer, strict=True)
    return tuple((start - first, stop - first) for (start, stop), (first, _) in edges)


def intersection(one: Box, other: Box) -> Box | None:
    """Returns what two boxes have in common; None where that is nothing."""
    found = []
    for (start, stop), (first, last) in zip(one, other, strict=True):
        low, high = max(start, first), min(stop, last)
        if low >= high:
            return None
        found.append((low, high))
    return tuple(found)


def without(box: Box, other: Box) -> list[Box]:
    """Returns boxes that are `box` less what `other` has of it."""
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
    """Returns boxes of the same elements that do not overlap, neighbours as one."""
    found: list[Box] = []
    for box in sorted(set(boxes)):
        if volume(box):
            found += remaining(box, found)
    return _joined(found)


def remaining(box: Box, taken: Iterable[Box]) -> list[Box]:
    """Returns boxes that are `box` less what is in any of the `taken` ones."""
    left = [box]
    for other in taken:
        left = [rest for piece in left for rest in without(piece, other)]
    return left


def _joined(boxes: list[Box]) -> list[Box]:
    """Joins boxes that go on in each other along one dimension, until none does."""
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
