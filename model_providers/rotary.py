"""Rotary embeddings of packed rows, all at once."""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn


class PackedRotary(nn.Module):
    """PackedRotary gives the angles of each packed token, so that one call rotates all rows of a
    micro-batch.

    Megatron's unfused rotation of packed rows cuts the table of angles row by row, for queries and
    for keys of every layer: thousands of calls for small rows. It does so by the edges of *padded*
    rows where it is given any. Told of one row as long as all of them, it makes one cut, of angles
    that are already in the tokens' order.
    """

    def __init__(self, table: nn.Module):
        """`table` is Megatron's module: length -> angles [length, 1, 1, D], or a tuple that begins
        with them.
        """
        super().__init__()
        self.table = table
        self._positions = torch.zeros(0, dtype=torch.int64)
        self._context = (0, 1)

    def next(self, sequence: PackedSeqParams, positions: Tensor, *, rank: int, ranks: int) -> None:
        """Prepares the next forward pass, of tokens at `positions` [N] in their rows: what
        context-parallel rank `rank` of `ranks` has.

        Changes the padded edges of `sequence`, which nothing else reads where this is used.
        """
        self._positions, self._context = positions, (rank, ranks)
        # on the host: Megatron asks for its numbers
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
        """Returns [N x ranks, 1, 1, D]: this rank's tokens at the places where Megatron looks for
        its two zig-zag chunks of one row.
        """
        mine = angles[self._positions]
        rank, ranks = self._context
        if ranks == 1:
            return mine
        first, second = mine.chunk(2)
        half = len(first)
        whole = mine.new_zeros(ranks * len(mine), *mine.shape[1:])
        whole[rank * half : (rank + 1) * half] = first
        whole[len(whole) - (rank + 1) * half : len(whole) - rank * half] = second
        return whole
