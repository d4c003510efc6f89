"""Rows -> one packed sequence -> model -> statistics per token, back in rows. No padding is computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from rftmega.megatron.logprobs import Shard, linear_stats
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


@contextmanager
def hidden_states_only(chunk: GPTModel) -> Iterator[None]:
    """Within, the last stage gives its normalised hidden states instead of multiplying them with the output weight."""
    kept, chunk.post_process = chunk.post_process, False
    try:
        yield
    finally:
        chunk.post_process = kept


def stats_of_hidden(
    hidden: Tensor, packed: Packed, chunk: GPTModel, topology: Topology, *, vocabulary: int, temperature: float | Tensor
) -> TokenStats:
    """Statistics of the sampling distribution, softmax(logits / temperature), from the last stage's hidden states [N, 1, H].

    `temperature` is one for all rows or [rows].
    """
    # As the output layer would: their backward adds up the ranks' shares of the gradient.
    if chunk.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    tied = chunk.share_embeddings_and_output_weights
    weight = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
    if isinstance(temperature, Tensor):
        temperature = torch.cat([temperature, temperature.new_ones(1)])[packed.row]  # the last one is the filler's
    shard = Shard.of_rank(len(weight), vocabulary=vocabulary, rank=topology.tensor_rank, group=topology.tensor_group)
    logp, entropy = (unpack(x, packed) for x in linear_stats(hidden[:, 0], weight, packed.targets, temperature, shard))
    return TokenStats(logp, entropy)
