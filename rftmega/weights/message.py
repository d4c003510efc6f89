"""Message format for tensor slices between two processes: one flat message per bucket, with the
push's version and a checksum per slice.

Consecutive slices of equal size are written, and their checksums computed, in one operation.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rftmega.core.errors import EngineError
from rftmega.runtime.parallel.checksum import blocks, checksums
from rftmega.weights.slices import TensorSlice


def message_bytes(sizes: Sequence[int]) -> int:
    """Returns the size in bytes of a message with slices of the given sizes (bytes), including
    header and padding.
    """
    return blocks(8 * (1 + len(sizes))) + sum(map(blocks, sizes))


def copy_together(target: Tensor, views: list[Tensor]) -> None:
    """Copies the n tensors `views`, which have one shape, into `target` [n, *shape]."""
    if len(views) == 1:
        target[0].copy_(views[0])
    elif target.is_contiguous() and target.dim() > 1 and target.dtype == views[0].dtype:
        # far cheaper on the CPU than one copy per view
        torch.cat(views, out=target.flatten(0, 1))
    else:
        torch._foreach_copy_(target.unbind(), views)


class Alike(NamedTuple):
    """Alike is a run of `number` consecutive slices of a message, from slice `first` on, that have
    one shape and dtype and lie contiguously from byte `start` on.
    """

    first: int
    number: int
    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Returns the size of one slice in bytes, without padding."""
        return self.shape.numel() * self.dtype.itemsize

    def stored(self, message: Tensor) -> Tensor:
        """Returns the run's bytes in the message with their padding, as [number, padded bytes of a
        slice].
        """
        size = blocks(self.bytes)
        return message[self.start : self.start + self.number * size].view(self.number, size)

    def slices(self, message: Tensor) -> Tensor:
        """Returns views of the run's slices in the message, as [number, *shape]."""
        return self.stored(message)[:, : self.bytes].view(self.dtype).view(self.number, *self.shape)


class Layout:
    """Layout holds the byte offset of each slice in a message (`places`) and the message's size.
    Sender and receiver compute the same layout once from the same list of slices.
    """

    def __init__(self, slices: Sequence[TensorSlice]):
        self.slices = list(slices)
        self.alike: list[Alike] = []
        self.places: list[int] = []  # the byte at which each slice begins
        self.payload = 0  # bytes of the slices alone
        start = blocks(8 * (1 + len(self.slices)))
        for number, each in enumerate(self.slices):
            shape, dtype = each.shape, each.tensor.dtype
            last = self.alike[-1] if self.alike else None
            if last and (last.shape, last.dtype) == (shape, dtype):
                self.alike[-1] = last._replace(number=last.number + 1)
            else:
                self.alike.append(Alike(number, 1, start, shape, dtype))
            self.places.append(start)
            self.payload += self.alike[-1].bytes
            start += blocks(self.alike[-1].bytes)
        self.bytes = start


def message_for(layout: Layout, device: torch.device) -> Tensor:
    """Allocates an uninitialised message for `layout`, a byte tensor [layout.bytes]."""
    return torch.empty(layout.bytes, dtype=torch.uint8, device=device)


def written(message: Tensor, layout: Layout, version: int, slices: list[Tensor]) -> Tensor:
    """Writes the push's version, the elements of the slices and their checksums into `message`, and
    returns `message`. `slices`: the elements of each slice, in the order of `layout`.
    """
    for alike in layout.alike:
        copy_together(alike.slices(message), slices[alike.first : alike.first + alike.number])
        alike.stored(message)[:, alike.bytes :].zero_()  # the checksum covers it
    header = _header(message, layout)
    header[0] = version
    header[1:] = checksums_of(message, layout)
    return message


def refuse_damaged(message: Tensor, layout: Layout, version: int, source: int) -> None:
    """Raises EngineError if the message belongs to another push than `version` or a slice does not
    match its checksum. `source`: the sending process, for the error text.
    """
    header = _header(message, layout)
    if header[0] != version:
        raise EngineError(
            f"Process {source} sent push {int(header[0])} while this one takes push {version}."
        )
    wrong = (header[1:] != checksums_of(message, layout)).nonzero()
    if len(wrong):
        raise EngineError(
            f"{layout.slices[int(wrong[0])]} of push {version} came damaged from process {source}."
        )


def opened(message: Tensor, layout: Layout) -> Iterator[tuple[TensorSlice, Tensor]]:
    """Yields each slice of the message with a view of its elements."""
    for alike in layout.alike:
        yield from zip(layout.slices[alike.first :], alike.slices(message).unbind(), strict=False)


def sums_of(message: Tensor, layout: Layout) -> Tensor:
    """Returns a copy of the slices' checksums that the sender stored in the message's header,
    [number of slices] int64.
    """
    return _header(message, layout)[1:].clone()


def checksums_of(message: Tensor, layout: Layout) -> Tensor:
    """Computes the checksum of each slice in a message, including the slice's padding. Returns
    [number of slices] int64.
    """
    return torch.cat([checksums(alike.stored(message)) for alike in layout.alike])


def _header(message: Tensor, layout: Layout) -> Tensor:
    return message[: 8 * (1 + len(layout.slices))].view(torch.int64)
