"""Rotary embeddings of all packed rows at once."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn


class PackedRotary(nn.Module):
    """PackedRotary returns the angles of each packed token, so that one call rotates all rows of a
    micro-batch.

    Megatron's unfused rotation of packed rows slices the table of angles row by row, for queries
    and for keys of every layer: thousands of calls for small rows. It does so by the edges of
    *padded* rows if there are any. Given one row as long as all of them, it takes one slice, of
    angles that are already in the tokens' order.
    """

    def __init__(self, table: nn.Module):
        """Wraps Megatron's module `table`: length -> angles [length, 1, 1, D], or a tuple that
        begins with them.
        """
        super().__init__()
        self.table = table
        self._positions = torch.zeros(0, dtype=torch.int64)
        self._context = (0, 1)

    def next(self, sequence: PackedSeqParams, positions: Tensor, *, rank: int, ranks: int) -> None:
        """Prepares the next forward pass, with tokens at `positions` [N] in their rows: those of
        context-parallel rank `rank` of `ranks`.

        Changes the padded edges of `sequence`, which nothing else reads where this is used.
        """
        self._positions, self._context = positions, (rank, ranks)
        # on the host: Megatron reads its numbers
        edges = torch.tensor([0, ranks * len(positions)], dtype=torch.int32)
        sequence.cu_seqlens_q_padded = sequence.cu_seqlens_kv_padded = edges

    def get_rotary_seq_len(self, *given: Any, **named: Any) -> int:
        table: Any = self.table
        return table.get_rotary_seq_len(*given, **named)

    def forward(self, *given: Any, packed_seq: bool = False, **named: Any) -> Any:
        found = self.table(*given, packed_seq=packed_seq, **named)
        if not packed_seq:
            return found
        if isinstance(found, tuple):
            return self._of_tokens(found[0]), *found[1:]
        return self._of_tokens(found)

    def _of_tokens(self, angles: Tensor) -> Tensor:
        return self._placed(angles[self._positions])

    def _placed(self, mine: Tensor) -> Tensor:
        """Returns [N x ranks, 1, 1, D]: this rank's angles at the positions where Megatron looks
        for its two zig-zag chunks of one row.
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
    """MultimodalRotary returns the angles of tokens with three position numbers: time, height and
    width (Qwen2-VL, arXiv:2409.12191).

    Megatron-Core 0.16's own module does not interleave the three, and slices packed rows as if they
    were one under context parallelism.
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

        `sections`: number of frequencies for each of the three, in blocks or `interleaved`.
        `by_rows`: attention reads the edges of padded rows, so that each row must be sliced by
        itself.
        """
        super().__init__(nn.Identity())
        self.by_rows = by_rows
        powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self._frequencies = 1.0 / base**powers
        self._axis = _axis_of(sections, interleaved=interleaved)  # position axis of each frequency

    def next(self, sequence: PackedSeqParams, positions: Tensor, *, rank: int, ranks: int) -> None:
        """Prepares the next forward pass, with tokens at `positions` [N, 3]: those of
        context-parallel rank `rank` of `ranks`, or with `by_rows` those of all ranks.
        """
        if self.by_rows:
            self._positions, self._context = positions, (0, 1)
        else:
            super().next(sequence, positions, rank=rank, ranks=ranks)

    def get_rotary_seq_len(self, *given: Any, **named: Any) -> int:
        return 0

    def forward(self, *given: Any, packed_seq: bool = False, **named: Any) -> Tensor:
        """Returns the angles [N, 1, 1, D], where Megatron looks for them."""
        where = self._positions.device
        positions = self._positions[:, self._axis.to(where)].float()
        angles = positions * self._frequencies.to(where)
        return self._placed(torch.cat([angles, angles], dim=-1)[:, None, None])


def _axis_of(sections: Sequence[int], *, interleaved: bool) -> Tensor:
    """Returns [D / 2] int64: the position axis of each frequency."""
    axis = torch.arange(3).repeat_interleave(torch.tensor(sections))
    if interleaved:  # t h w t h w ... t t
        axis = torch.zeros_like(axis)
        for each in (1, 2):
            axis[each : 3 * sections[each] : 3] = each
    return axis
