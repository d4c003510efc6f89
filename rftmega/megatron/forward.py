"""Rows -> one packed sequence -> model -> statistics per token, back in rows. No padding is computed."""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rftmega.megatron.logprobs import vocab_parallel_stats
from rftmega.parallel.topology import Topology
from rftmega.types import Rows, TokenStats


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of one micro-batch, end to end. The last token of a row predicts nothing here, so it is left out."""

    tokens: Tensor  # [1, N] inputs
    targets: Tensor  # [N]
    positions: Tensor  # [1, N], starting at 0 in every row
    sequence: PackedSeqParams
    row: Tensor  # [N] which row; len(rows) for filler
    column: Tensor  # [N] which target column of it; 0 for filler
    shape: tuple[int, int]  # rows, target columns


def pack(rows: Rows, *, multiple_of: int, where: torch.device) -> Packed:
    """Lays rows (on the host) end to end, then filler up to a multiple as a row of its own; an empty batch is filler only."""
    counts = (rows.lengths - 1).clamp(min=0)
    total = int(counts.sum())
    filler = -total % multiple_of if total else multiple_of
    lengths = torch.cat([counts[counts > 0], counts.new_tensor([filler] if filler else [])])
    edges = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    position = torch.arange(int(edges[-1])) - edges[:-1].repeat_interleave(lengths)
    row, column = torch.arange(len(rows)).repeat_interleave(counts), position[:total]
    nothing = counts.new_zeros(filler)
    tokens = torch.cat([rows.tokens[row, column], nothing])
    targets = torch.cat([rows.tokens[row, column + 1], nothing])
    longest = int(lengths.max())
    cumulative = edges.to(device=where, dtype=torch.int32)
    return Packed(
        tokens=tokens[None].to(where),
        targets=targets.to(where),
        positions=position[None].to(where),
        sequence=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cumulative,
            cu_seqlens_kv=cumulative,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        row=torch.cat([row, nothing + len(rows)]).to(where),
        column=torch.cat([column, nothing]).to(where),
        shape=(len(rows), rows.tokens.shape[1] - 1),
    )


def unpack(values: Tensor, packed: Packed) -> Tensor:
    """[N] per packed token -> [rows, columns], 0 where there is no token; differentiable."""
    rows, columns = packed.shape
    canvas = values.new_zeros(rows + 1, max(columns, 1))  # the last row takes the filler
    return canvas.index_put((packed.row, packed.column), values)[:rows, :columns]


def stats_of_logits(logits: Tensor, packed: Packed, topology: Topology, *, vocabulary: int, temperature: float) -> TokenStats:
    """Statistics of the sampling distribution, softmax(logits / temperature), from this rank's logits [1, N, V / tensor]."""
    per_token = vocab_parallel_stats(
        logits[0],
        packed.targets,
        temperature=temperature,
        vocabulary=vocabulary,
        rank=topology.tensor_rank,
        group=topology.tensor_group,
    )
    logp, entropy = (unpack(x, packed) for x in per_token)
    return TokenStats(logp, entropy)
