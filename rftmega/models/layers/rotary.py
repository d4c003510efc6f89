"""Rotary embeddings of all packed rows of a micro-batch at once."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn


class PackedRotary(nn.Module):
    """PackedRotary returns the rotary angles of each packed token, so that one call rotates all
    rows of a micro-batch.
    Megatron's unfused rotation of packed rows slices the table of angles row by row, for queries
    and for keys of every layer: thousands of calls for small rows. It takes the row boundaries from
    `cu_seqlens_q_padded` if that is set. `next` sets it to a single row that contains all tokens,
    so that Megatron takes one slice, of angles that are already in the tokens' order.
    """

    def __init__(self, table: nn.Module, *, by_rows: bool = False, fused: bool = False):
        """Wraps Megatron's rotary module `table`, which maps a length to angles [length, 1, 1, D],
        or to a tuple that begins with the angles.

        `by_rows`: attention uses the boundaries of padded rows, so each row's angles are sliced
        separately, except for rows that share beginnings. `fused`: a kernel rotates packed rows.
        """
        super().__init__()
        self.table, self.by_rows, self.fused = table, by_rows, fused
        self._at_once = not by_rows
        self._positions = torch.zeros(0, dtype=torch.int64)
        self._context = (0, 1)

    def next(self, sequence: PackedSeqParams, positions: Tensor, *, rank: int, ranks: int) -> None:
        """Sets the positions for the next forward pass: `positions` [N] are the positions of this
        process's tokens within their rows, on context-parallel rank `rank` of `ranks`.

        Unless rows are rotated separately, changes the padded row boundaries of `sequence`, the
        micro-batch's PackedSeqParams, which nothing else reads then.
        """
        self._at_once = not self.by_rows or hasattr(sequence, "tree")
        if not self._at_once:
            return
        self._positions, self._context = positions, (rank, ranks)
        edges = torch.tensor([0, ranks * len(positions)], dtype=torch.int32)
        if self.fused:  # otherwise on the host, where Megatron reads its numbers
            edges = edges.to(positions.device, non_blocking=True)
        sequence.cu_seqlens_q_padded = sequence.cu_seqlens_kv_padded = edges

    def get_rotary_seq_len(self, *given: Any, **named: Any) -> int:
        table: Any = self.table
        return table.get_rotary_seq_len(*given, **named)

    def forward(self, *given: Any, packed_seq: bool = False, **named: Any) -> Any:
        found = self.table(*given, packed_seq=packed_seq, **named)
        if not packed_seq or not self._at_once:
            return found
        if isinstance(found, tuple):
            return self._of_tokens(found[0]), *found[1:]
        return self._of_tokens(found)

    def _of_tokens(self, angles: Tensor) -> Tensor:
        return self._placed(angles[self._positions])

    def _placed(self, mine: Tensor) -> Tensor:
        """Returns angles [N x ranks, 1, 1, D], which contain this rank's angles `mine` [N, 1, 1, D]
        at the positions from which Megatron takes the rank's two zig-zag chunks of a single row,
        and zeros elsewhere.
        """
        rank, ranks = self._context
        if ranks == 1:
            return mine
        first, second = mine.chunk(2)
        half = len(first)
        whole = mine.new_zeros(ranks * len(mine), *mine.shape[1:])
        whole[rank * half : (rank + 1) * half] = first
        whole[len(whole) - (rank + 1) * half : len(whole) - rank * half] = second
        return whole


class MultimodalRotary(PackedRotary):
    """MultimodalRotary returns the rotary angles of tokens with three position numbers: time,
    height and width (Qwen2-VL, arXiv:2409.12191).
    Megatron-Core 0.16's own module does not support interleaved frequencies, and under context
    parallelism slices packed rows as if they were one row.
    """

    def __init__(
        self,
        head_dim: int,
        base: float,
        sections: Sequence[int],
        *,
        interleaved: bool,
        by_rows: bool,
    ):
        """Creates the module.

        `sections`: number of frequencies for each of time, height and width; they follow each other
        in blocks, or are `interleaved`. `by_rows`: as in PackedRotary.
        """
        super().__init__(nn.Identity(), by_rows=by_rows)
        powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self._frequencies = 1.0 / base**powers
        self._axis = _axis_of(sections, interleaved=interleaved)  # position axis of each frequency

    def next(self, sequence: PackedSeqParams, positions: Tensor, *, rank: int, ranks: int) -> None:
        """Sets the positions for the next forward pass: `positions` [N, 3] are the positions of the
        tokens of context-parallel rank `rank` of `ranks`, or where rows are rotated separately of
        the tokens of all ranks.
        """
        super().next(sequence, positions, rank=rank, ranks=ranks)
        if not self._at_once:
            self._positions, self._context = positions, (0, 1)

    def get_rotary_seq_len(self, *given: Any, **named: Any) -> int:
        return 0

    def forward(self, *given: Any, packed_seq: bool = False, **named: Any) -> Tensor:
        """Returns the angles [N, 1, 1, D] of the tokens, arranged as Megatron slices them (see
        `_placed`).
        """
        where = self._positions.device
        positions = self._positions[:, self._axis.to(where)].float()
        angles = positions * self._frequencies.to(where)
        return self._placed(torch.cat([angles, angles], dim=-1)[:, None, None])


def _axis_of(sections: Sequence[int], *, interleaved: bool) -> Tensor:
    """Returns [D / 2] int64: for each rotary frequency the index of the position number that it
    multiplies (0 time, 1 height, 2 width).

    `sections`, `interleaved`: see MultimodalRotary.
    """
    axis = torch.arange(3).repeat_interleave(torch.tensor(sections))
    if interleaved:  # t h w t h w ... t t
        axis = torch.zeros_like(axis)
        for each in (1, 2):
            axis[each : 3 * sections[each] : 3] = each
    return axis
