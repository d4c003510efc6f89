"""Ragged: rows of different lengths without padding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 1 << 24  # maximum elements padded at a time
# rows are padded up to this many times their own elements, for example short rows beside a long one
PADDED, ALWAYS = 4, 1 << 18  # elements that may be padded in any case
SHORT = 256  # mean length below which one gather is faster than a copy per row


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Ragged holds B rows of values, each with its own length.

    Rows lie anywhere in `values`, so selecting or reordering rows copies nothing.
    """

    values: Tensor  # [N], or [N, ...] for vectors
    starts: Tensor  # [B] int64: first index of each row in `values`
    lengths: Tensor  # [B] int64

    @staticmethod
    def packed(values: Tensor, lengths: Tensor) -> "Ragged":
        """Builds a Ragged whose rows, of these lengths ([B] int64), lie one after another in
        `values`.
        """
        return Ragged(values, lengths.cumsum(0) - lengths, lengths)

    @staticmethod
    def of(rows: Sequence[Tensor]) -> "Ragged":
        """Builds a Ragged from tensors [n], one per row; at least one is required."""
        return Ragged.packed(torch.cat(list(rows)), torch.tensor([len(row) for row in rows]))

    @staticmethod
    def of_padded(padded: Tensor, lengths: Tensor) -> "Ragged":
        """Builds a Ragged from the first `lengths` [B] values of each row of `padded` [B, T]."""
        inside = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
        return Ragged.packed(padded[inside], lengths)

    @staticmethod
    def join(parts: "Sequence[Ragged]") -> "Ragged":
        """Joins the rows of all parts, in their order."""
        values = torch.cat([part.flat for part in parts])
        return Ragged.packed(values, torch.cat([part.lengths for part in parts]))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Tensor:
        """Returns the values of one row, [n], as a view."""
        start = int(self.starts[row])
        return self.values[start : start + int(self.lengths[row])]

    def __iter__(self) -> Iterator[Tensor]:
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            yield self.values[start : start + length]

    @property
    def flat(self) -> Tensor:
        """Returns [sum of lengths]: the concatenated rows, as a view if they are contiguous."""
        ends = self.lengths.cumsum(0)
        if not len(ends):
            return self.values[:0]
        first = int(self.starts[0])
        if torch.equal(self.starts - first, ends - self.lengths):
            return self.values[first : first + int(ends[-1])]
        return self.values[self._places()] if self._short else torch.cat(list(self))

    def with_values(self, flat: Tensor) -> "Ragged":
        """Returns rows of the same lengths whose values are `flat`, [sum of lengths]: the new rows
        one after another.
        """
        return Ragged.packed(flat, self.lengths)

    def select(self, index: Tensor) -> "Ragged":
        """Returns the rows at `index` (int64 [b]); copies nothing."""
        return Ragged(self.values, self.starts[index], self.lengths[index])

    def shifted(self, by: int) -> "Ragged":
        """Returns the rows without their first `by` values; copies nothing."""
        return Ragged(self.values, self.starts + by, (self.lengths - by).clamp(min=0))

    def shortened(self) -> "Ragged":
        """Returns the rows without their last value; copies nothing."""
        return Ragged(self.values, self.starts, (self.lengths - 1).clamp(min=0))

    def padded(self, *, width: int | None = None, fill: float = 0) -> Tensor:
        """Returns a tensor [B, width, ...] with `fill` after the end of each row; width None: the
        length of the longest row.
        """
        if width is None:
            width = int(self.lengths.max()) if len(self) else 0
        if self._short and len(self.values):
            places = self.starts[:, None] + torch.arange(width)
            values = self.values[places.clamp(max=len(self.values) - 1)]
            outside = ~self._inside(width).to(values.device)
            return values.masked_fill_(
                outside.view(*outside.shape, *[1] * (values.dim() - 2)), fill
            )
        found = self.values.new_full((len(self), width, *self.values.shape[1:]), fill)
        for row, values in enumerate(self):
            found[row, : len(values)] = values
        return found

    def assign(self, padded: Tensor) -> None:
        """Writes the values of `padded` [B, at least the longest row] into the rows, in place."""
        if self._short:
            self.values[self._places()] = padded[self._inside(padded.shape[1])]
            return
        for row, values in zip(self, padded, strict=True):
            row.copy_(values[: len(row)])

    def extended(self, fill: float = 0) -> "Ragged":
        """Returns the rows with one more value, `fill`, at the end of each."""
        return Ragged.of([functional.pad(row, (0, 1), value=fill) for row in self])

    def at(self, column: Tensor) -> Tensor:
        """Returns [B]: the value of each row at index `column` ([B] int64)."""
        return self.values[self.starts + column]

    def spread(self, of_row: Tensor) -> Tensor:
        """Returns [sum of lengths]: for each element the entry of `of_row` ([B]) for the element's
        row.
        """
        return of_row.repeat_interleave(self.lengths)

    def sums(self) -> Tensor:
        """Returns [B]: the sum of each row; for booleans the number of True values."""
        whole = self.values.dtype in (torch.bool, torch.int32)
        kind = torch.int64 if whole else self.values.dtype
        if whole and self._short:
            return self.lengths.new_zeros(len(self)).index_add(
                0, self.spread(torch.arange(len(self))), self.flat.to(kind)
            )
        return torch.stack([row.sum(dtype=kind) for row in self]) if len(self) else self.lengths

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Ragged":
        return self.with_values(self.flat.to(device, non_blocking=non_blocking))

    @property
    def _short(self) -> bool:
        """Returns whether rows are so short that a loop over rows would be slower than a gather."""
        return int(self.lengths.sum()) < SHORT * len(self)

    def _places(self) -> Tensor:
        """Returns [sum of lengths]: the position in `values` of each element, row by row."""
        before = self.lengths.cumsum(0) - self.lengths
        return torch.arange(int(self.lengths.sum())) + self.spread(self.starts - before)

    def _inside(self, width: int) -> Tensor:
        """Returns a mask [B, width] that is True for columns below the row's length."""
        return torch.arange(width) < self.lengths[:, None]


def by_rows(function: Callable[..., Tensor], *given: Any) -> Ragged:
    """Applies a row-wise `function` to the rows, padded a chunk of rows at a time, and returns the
    results as a Ragged.

    `given`: Ragged of the same rows (the function gets [b, T] of each), tensors [B] (the function
    gets [b]) or any other value, passed on unchanged. The function returns [b, T].
    """
    like = next(one for one in given if isinstance(one, Ragged))
    found: list[Tensor] = []
    for index in chunks(like.lengths):
        own = [_of_rows(one, index) for one in given]
        lengths = like.lengths[index]
        found.append(Ragged.of_padded(function(*own), lengths).values)
    return like.with_values(torch.cat(found) if found else like.values[:0])


def _of_rows(given: Any, index: Tensor) -> Any:
    if isinstance(given, Ragged):
        return given.select(index).padded()
    return given[index] if isinstance(given, Tensor) and given.dim() else given


def chunks(lengths: Tensor) -> Iterator[Tensor]:
    """Yields the indices of consecutive rows that are padded together; at least one row each.

    Padded, they have at most CHUNK elements, and at most PADDED times as many as without padding
    (or ALWAYS).
    """
    begin, widest, total = 0, 0, 0
    for row, length in enumerate(lengths.tolist()):
        widest, total = max(widest, length), total + length
        most = min(CHUNK, max(ALWAYS, PADDED * total))
        if row > begin and (row + 1 - begin) * widest > most:
            yield torch.arange(begin, row)
            begin, widest, total = row, length, length
    if begin < len(lengths):
        yield torch.arange(begin, len(lengths))
