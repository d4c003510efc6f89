"""Replays the recorded copies of an engine's loader in as few operations as possible.

An MoE model has tens of thousands of tensors; copying each tensor separately costs more CPU time
than the transfer takes.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from rftmega.core.shards import Box, LogicalTensor, as_integers, intersection, volume
from rftmega.core.shards import within as seen_from
from rftmega.runtime.parallel.checksum import checksums
from rftmega.weights.message import Layout, copy_together
from rftmega.weights.recording import Copy, Geometry
from rftmega.weights.slice_sums import SliceSums
from rftmega.weights.slices import LocalShards, TensorSlice


class Run(NamedTuple):
    """Run is a sequence of `number` views of one size and stride whose offsets in a storage grow by
    `step` elements.
    """

    number: int
    step: int
    first: Geometry

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the views of the storage of `tensor` that this run describes, as one view
        [number, *size].
        """
        return tensor.as_strided(
            (self.number, *self.first.size), (self.step, *self.first.stride), self.first.offset
        )

    def followed_by(self, view: Geometry) -> "Run | None":
        """Returns the run extended by `view`; None if `view` has another size or stride, or does
        not follow at the run's distance.
        """
        if view[:2] != self.first[:2]:
            return None
        step = self.step if self.number > 1 else view.offset - self.first.offset
        fits = step > 0 and view.offset == self.first.offset + self.number * step
        return Run(self.number + 1, step, self.first) if fits else None


class Received(NamedTuple):
    """Received is a group of slices of the message from process `source` that one operation copies
    to views of a parameter. `within`: the slices' elements in the message; `target`: the views of
    the parameter. Both are evenly spaced.
    """

    source: int
    within: Run  # of the message, in elements
    target: Run


class Fill:
    """Fill holds all copies of one bucket into one parameter: from received messages, and from
    `slices` of this process's own shards. `dtype`: of the HF tensors that are copied.
    """

    def __init__(self, parameter: str, dtype: torch.dtype):
        self.parameter, self.dtype = parameter, dtype
        self.elements = 0
        self.received: list[Received] = []
        self.slices: list[TensorSlice] = []
        self.targets: list[Geometry] = []  # of the slices
        self._from_messages: list[tuple[int, Geometry, Geometry]] = []
        self._own: list[tuple[Run, list[Tensor]]] = []
        self._generation = -1

    def add(self, source: int, within: Geometry, target: Geometry) -> None:
        """Adds a copy of the view `within` of the message from `source` to the view `target` of the
        parameter.
        """
        self._from_messages.append((source, within, target))
        self.elements += math.prod(target.size)

    def add_own(self, own: TensorSlice, target: Geometry) -> None:
        self.slices.append(own)
        self.targets.append(target)
        self.elements += math.prod(target.size)

    def settle(self) -> None:
        """Merges the copies from messages: slices that are evenly spaced in both message and
        parameter become one copy.
        """
        for source, within, target in sorted(
            self._from_messages, key=lambda each: (each[0], each[1].offset)
        ):
            last = (
                self.received[-1] if self.received and self.received[-1].source == source else None
            )
            both = last and (last.within.followed_by(within), last.target.followed_by(target))
            if last and both and both[0] and both[1]:
                self.received[-1] = Received(source, both[0], both[1])
            else:
                self.received.append(Received(source, Run(1, 0, within), Run(1, 0, target)))
        self._from_messages.clear()
        self._sums = runs_of(self.targets)

    def own(self, shards: LocalShards) -> list[tuple[Run, list[Tensor]]]:
        """Returns runs of target views in the parameter, each with its source views in this
        process's shards. Views that are adjacent in both (e.g. gate and up) are joined.
        """
        if shards.computed:  # kept, they would be the model once more
            return self._runs(shards)
        if self._generation != shards.generation:
            self._own = self._runs(shards)
            self._generation = shards.generation
        return self._own

    def _runs(self, shards: LocalShards) -> list[tuple[Run, list[Tensor]]]:
        targets, views = _joined(self.targets, shards.slices_of(self.slices))
        runs = runs_of(targets)
        ends = accumulate(run.number for run in runs)
        return [(run, views[end - run.number : end]) for run, end in zip(runs, ends, strict=True)]

    def note(self, parameter: Tensor, shards: LocalShards, sums: SliceSums) -> None:
        """Adds to `sums` the checksums of the slices that were copied from this process's `shards`
        into `parameter`, computed from the parameter's present values.
        """
        end = 0
        for run in self._sums:
            begin, end = end, end + run.number
            of_another = parameter.dtype != self.dtype
            slices = (
                torch.stack(shards.slices_of(self.slices)[begin:end])
                if of_another
                else run.of(parameter)
            )
            sums.used(self.slices[begin:end], checksums(slices))


class ReceivedFill:
    """ReceivedFill is a Fill together with the messages of one push, by source process, from which
    it copies; `sums` gets the checksums of the slices copied from this process's shards.
    """

    def __init__(
        self, fill: Fill, messages: Mapping[int, Tensor], shards: LocalShards, sums: SliceSums
    ):
        self.fill, self.shards, self.sums = fill, shards, sums
        self.done = False
        self._messages = {
            each.source: messages[each.source].view(fill.dtype) for each in fill.received
        }

    def into(self, parameter: Tensor) -> None:
        """Copies all of the Fill's elements into a parameter of the recorded shape.

        For a meta parameter, runs a meta copy of as many elements instead, which the engine counts.
        """
        if parameter.is_meta:
            torch.empty(self.fill.elements, device="meta").copy_(
                torch.empty(self.fill.elements, device="meta")
            )
            return
        whole = parameter.detach()
        for source, within, target in self.fill.received:
            target.of(whole).copy_(within.of(self._messages[source]))
        for run, views in self.fill.own(self.shards):
            copy_together(run.of(whole), views)
        self.fill.note(whole, self.shards, self.sums)
        self.done = True

    def equals(self, parameter: Tensor) -> bool:
        """Returns whether the parameter already equals, bit for bit, the elements that `into` would
        copy to it.
        """
        whole = parameter.detach()
        pairs = [
            (target.of(whole), within.of(self._messages[source]))
            for source, within, target in self.fill.received
        ]
        for run, views in self.fill.own(self.shards):
            pairs += zip(run.of(whole).unbind(), views, strict=True)
        same = [
            (as_integers(target) == as_integers(source.to(target.dtype))).all()
            for target, source in pairs
        ]
        return bool(torch.stack(same).all()) if same else True


class Proof:
    """Proof checks that recorded copies can replace the engine's loader: it compares the parameters
    that the loader filled with the result that the recorded copies would have.
    """

    def __init__(self) -> None:
        self.wrong: set[str] = set()
        self._waiting: dict[str, list[ReceivedFill]] = defaultdict(list)

    def expect(self, fillings: Iterable[ReceivedFill]) -> None:
        for filling in fillings:
            self._waiting[filling.fill.parameter].append(filling)

    def filled(self, name: str, parameter: Tensor) -> None:
        """Compares the parameter `name` with the recorded copies, after the loader's last write to
        it.
        """
        if not all(filling.equals(parameter) for filling in self._waiting.pop(name, [])):
            self.wrong.add(name)

    def refuted(self) -> set[str]:
        """Returns the names of the parameters that the recorded copies do not reproduce."""
        return self.wrong | self._waiting.keys()


def fills_of(
    tensors: Sequence[LogicalTensor],
    layouts: Mapping[int, Layout],
    copies: Mapping[str, Sequence[tuple[str, Copy]]],
    shards: LocalShards,
) -> list[Fill]:
    """Returns the copies of one bucket into parameters, as one Fill per parameter. `tensors`: the
    bucket's tensors; `layouts`: the layout of the message from each source process; `copies`: by HF
    name, the recorded copies as (parameter name, copy).
    """
    arrived: dict[str, list[Arrived]] = defaultdict(list)
    for source, layout in layouts.items():
        for each, place in zip(layout.slices, layout.places, strict=True):
            arrived[each.name].append(
                Arrived(source, each.box, place // each.tensor.dtype.itemsize)
            )
    fills: dict[str, Fill] = {}
    for tensor in tensors:
        for number, name in enumerate(tensor.names):
            for parameter, copy in copies.get(name, []):
                fill = fills.setdefault(parameter, Fill(parameter, tensor.dtype))
                read = TensorSlice(tensor, number, copy.box)
                _add(fill, read, copy.target, shards, arrived.get(name, []))
    for fill in fills.values():
        fill.settle()
    return list(fills.values())


class Arrived(NamedTuple):
    """Arrived says where one block (box) of an HF tensor lies in the message that this process
    received from process `source`.
    """

    source: int
    box: Box
    place: int  # the element of the message at which it begins


def _add(
    fill: Fill,
    read: TensorSlice,
    target: Geometry,
    shards: LocalShards,
    arrived: Sequence[Arrived],
) -> None:
    """Adds one recorded copy to `fill`, split where its elements come from different sources: this
    process's shards or messages. `read`: the slice to be copied; `target`: its view of the
    parameter; `arrived`: the blocks of the same HF tensor in this process's messages.
    """
    here: list[tuple[Box, Arrived | None]] = [
        (box, None) for box in shards.boxes(read.tensor, read.number)
    ]
    here += [(came.box, came) for came in arrived]
    left = volume(read.box)
    for box, came in sorted(here, key=lambda each: each[0]):
        common = intersection(box, read.box)
        if common is None:
            continue
        left -= volume(common)
        into = _narrowed(target, seen_from(common, read.box))
        if came is None:
            fill.add_own(read._replace(box=common), into)
        else:
            shape = tuple(stop - start for start, stop in box)
            message = Geometry(shape, _natural(shape), came.place)
            fill.add(came.source, _narrowed(message, seen_from(common, box)), into)
    assert left == 0, (
        f"{left} elements of {read}, which goes to {fill.parameter}, come from nowhere"
    )


def runs_of(views: Sequence[Geometry]) -> list[Run]:
    """Groups consecutive views of one tensor into runs of evenly spaced views of equal size and
    stride.
    """
    found: list[Run] = []
    for view in views:
        longer = found[-1].followed_by(view) if found else None
        if longer:
            found[-1] = longer
        else:
            found.append(Run(1, 0, view))
    return found


def _joined(
    targets: Sequence[Geometry], views: Sequence[Tensor]
) -> tuple[list[Geometry], list[Tensor]]:
    """Joins consecutive copies whose rows are adjacent in both source (`views`) and target. Returns
    the joined targets and the joined source views.
    """
    joined: list[tuple[Geometry, Tensor]] = []
    for target, view in zip(targets, views, strict=True):
        if joined and _goes_on(joined[-1][0], target) and _is_next_to(joined[-1][1], view):
            above, elements = joined[-1]
            size = (above.size[0] + target.size[0], *target.size[1:])
            joined[-1] = (
                above._replace(size=size),
                elements.as_strided(size, elements.stride(), elements.storage_offset()),
            )
        else:
            joined.append((target, view))
    return [target for target, _ in joined], [view for _, view in joined]


def _is_next_to(above: Tensor, below: Tensor) -> bool:
    same = above.untyped_storage()._cdata == below.untyped_storage()._cdata
    return same and _goes_on(_geometry(above), _geometry(below))


def _goes_on(above: Geometry, below: Geometry) -> bool:
    alike = (
        above.stride == below.stride and above.size[1:] == below.size[1:] and len(above.size) > 0
    )
    return alike and below.offset == above.offset + above.size[0] * above.stride[0]


def _geometry(view: Tensor) -> Geometry:
    return Geometry(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))


def _narrowed(view: Geometry, box: Box) -> Geometry:
    size = tuple(stop - start for start, stop in box)
    moved = sum(start * step for (start, _), step in zip(box, view.stride, strict=True))
    return Geometry(size, view.stride, view.offset + moved)


def _natural(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def by_name(copies: Mapping[str, Sequence[Copy]]) -> dict[str, list[tuple[str, Copy]]]:
    """Regroups copies, given by parameter, by HF name. Returns (parameter, copy) pairs for each HF
    name.
    """
    found: dict[str, list[tuple[str, Copy]]] = defaultdict(list)
    for parameter, theirs in copies.items():
        for copy in theirs:
            found[copy.name].append((parameter, copy))
    return found


def message_order(slices: Iterable[TensorSlice]) -> list[TensorSlice]:
    """Returns the slices in the order of a message: slices of the same tensor of all layers and
    experts are adjacent, and so evenly spaced.
    """
    kinds: dict[tuple[str, int], list[TensorSlice]] = {}
    for each in slices:
        kinds.setdefault(each.kind, []).append(each)
    return [each for kind in kinds.values() for each in kind]
