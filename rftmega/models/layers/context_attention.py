"""Causal attention of packed rows whose tokens are divided over context-parallel processes.

Each process holds two chunks of every row, the c-th from the front and the c-th from the back
(zig-zag: equal work for all processes under a causal mask). It gathers the keys and values of the
other processes, as in Llama 3 (arXiv:2407.21783, section 3.3.2), in the forward pass and once more
in the backward pass: in between it stores only its own.
"""

import itertools
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rftmega.models.kernels.prefix_attention import (
    Attended,
    attend_backward,
    attend_forward,
    gradient_of_sinks,
    padded_heads,
)


class RowChunk(NamedTuple):
    """RowChunk holds one chunk of each of several rows, all of the same length, as a batch for
    attention: each chunk attends to its row up to the chunk's own end.
    """

    queries: Tensor  # [rows, q] indices of this process's tokens
    # [rows, k] indices of all processes' tokens, row by row; where a single row is divided over
    # processes, a range of them
    keys: Tensor | slice

    @property
    def whole(self) -> bool:
        """Returns whether the queries are all tokens of their rows."""
        return self.keys is self.queries

    def to(self, device: torch.device) -> "RowChunk":
        queries = self.queries.to(device, non_blocking=True)
        if self.whole:
            return RowChunk(queries, queries)
        if isinstance(self.keys, slice):
            return RowChunk(queries, self.keys)
        return RowChunk(queries, self.keys.to(device, non_blocking=True))

    def of_keys(self, x: Tensor) -> Tensor:
        """Returns [rows, groups, k, d] of the keys, from `x` [tokens, groups, d]; where keys are a
        range, a view.
        """
        found = x[self.keys]
        return (found[None] if isinstance(self.keys, slice) else found).transpose(1, 2)

    def add(self, total: Tensor, grad: Tensor) -> None:
        """Adds `grad` [rows, groups, k, d] of the keys to `total` [tokens, groups, d], in place."""
        total[self.keys] += (
            grad[0].transpose(0, 1) if isinstance(self.keys, slice) else grad.transpose(1, 2)
        )

    def among(self, first: int, stop: int) -> "RowChunk":
        """Returns the same queries with the keys from number `first` to `stop` of each row."""
        if isinstance(self.keys, slice):
            return self._replace(keys=slice(self.keys.start + first, self.keys.start + stop))
        return self._replace(keys=self.keys[:, first:stop])

    def within(self, window: int | None) -> "RowChunk":
        """Returns the chunk with the keys that a sliding `window` of tokens reaches, as indices: a
        view would keep all keys in memory. None: all keys.
        """
        if window is None:
            return self
        index = self.keys
        if isinstance(index, slice):
            index = torch.arange(index.start, index.stop, device=self.queries.device)[None]
        keys = index.shape[1]
        first = max(0, keys - window - self.queries.shape[1] + 1)
        return self._replace(keys=index[:, first:])


class RowChunks(NamedTuple):
    """RowChunks are the chunks of a micro-batch's rows that one process computes."""

    batches: list[RowChunk]
    # [tokens]: place of each token, row by row, among those gathered process by process; None
    # without context parallelism
    order: Tensor | None


def chunks_of(packed: PackedSeqParams, rank: int, processes: int) -> RowChunks:
    """Returns the chunks of rows that rank `rank` of `processes` context-parallel ranks computes,
    as batches: whole rows without context parallelism, otherwise two chunks per row.

    `packed`: Megatron's parameters of the micro-batch's packed sequence, to which `pack` has added
    the rows' edges on the host (`packed.edges`). Rows of one length form one batch, since a call
    per row would cost more than the attention of short rows. The first layer stores the result in
    `packed.chunks`, and later layers read it from there.
    """
    found: RowChunks | None = getattr(packed, "chunks", None)
    if found is None:
        where = packed.cu_seqlens_q.device
        starts: dict[int, list[int]] = defaultdict(list)
        for start, stop in itertools.pairwise(packed.edges):
            starts[stop - start].append(start)
        batches = [
            chunk.to(where)
            for length, begin in starts.items()
            for chunk in _chunks_of_length(length, begin, rank, processes)
        ]
        order = None
        if processes > 1:
            order = _row_order(packed.edges, processes).to(where, non_blocking=True)
        found = packed.chunks = RowChunks(batches, order)
    return found


def _chunks_of_length(length: int, starts: list[int], rank: int, processes: int) -> list[RowChunk]:
    """Returns the batches of chunks for rows of `length` tokens on rank `rank` of `processes`
    context-parallel ranks; `starts` lists the first token of each row.
    """
    begin = torch.tensor(starts)[:, None]
    if processes == 1:
        index = begin + torch.arange(length)
        return [RowChunk(index, index)]
    chunk = length // (2 * processes)
    found = []
    for second, number in enumerate((rank, 2 * processes - 1 - rank)):
        keys = (number + 1) * chunk
        queries = begin // processes + second * chunk + torch.arange(chunk)
        one = slice(starts[0], starts[0] + keys) if len(starts) == 1 else None
        found.append(RowChunk(queries, one or begin + torch.arange(keys)))
    return found


def _row_order(edges: list[int], processes: int) -> Tensor:
    """Returns the place of each token, row by row, among those gathered process by process; rows
    have these `edges` among all tokens.
    """
    each = edges[-1] // processes
    found = []
    for start, stop in itertools.pairwise(edges):
        chunk = (stop - start) // (2 * processes)
        for number in range(2 * processes):
            holder, second = (number, 0) if number < processes else (2 * processes - 1 - number, 1)
            found.append(holder * each + start // processes + second * chunk)
    lengths = torch.tensor([stop - start for start, stop in itertools.pairwise(edges)])
    sizes = (lengths // (2 * processes)).repeat_interleave(2 * processes)
    within = torch.arange(edges[-1]) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return torch.tensor(found).repeat_interleave(sizes) + within


def gathered(key: Tensor, value: Tensor, chunks: RowChunks, group: Any) -> tuple[Tensor, Tensor]:
    """Gathers keys and values [n, groups, d] from all context-parallel processes of `group`, and
    returns both, row by row; differentiable.
    """
    both = tensor_parallel.gather_from_sequence_parallel_region(
        torch.cat([key, value], -1), group=group
    )
    in_order = both[chunks.order]
    return in_order[..., : key.shape[-1]], in_order[..., key.shape[-1] :]


def attend_across(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chunks: RowChunks,
    group: Any,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention of this process's queries [n, heads, d] over the keys and values of all
    context-parallel processes of `group`, of which this one holds [n, groups, d]; returns [n,
    heads, d of values]. Needs `prefix_attention.has_kernel`.

    `chunks`: the rows' chunks on this process. `scale` and `sinks`: see `attend_to_prefix`.
    """
    width = value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attended: Tensor = _AttentionAcross.apply(
        *padded_heads(query, key, value), chunks, group, scale, sinks
    )
    return attended[..., :width]


class _AttentionAcross(torch.autograd.Function):
    """_AttentionAcross is `attend_across` for heads of one size. The backward pass gathers keys and
    values again, and sums their gradients over the processes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        chunks: RowChunks,
        group: Any,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        ctx.chunks, ctx.group, ctx.scale, ctx.seeds = chunks, group, scale, []
        attended = torch.empty_like(query)
        sums = query.new_empty(
            query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32)
        )
        all_keys, all_values = gathered(key, value, chunks, group)
        for chunk in chunks.batches:
            own = query[chunk.queries].transpose(1, 2)
            keys, values = chunk.of_keys(all_keys), chunk.of_keys(all_values)
            found = attend_forward(own, keys, values, scale, sinks)
            attended[chunk.queries] = found.values.transpose(1, 2)
            sums[chunk.queries] = found.denominator.transpose(1, 2)
            ctx.seeds.append(found.seeds)
        ctx.save_for_backward(query, key, value, attended, sums, sinks)
        return attended

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, attended, sums, sinks = ctx.saved_tensors
        chunks: RowChunks = ctx.chunks
        assert chunks.order is not None
        width = key.shape[-1]
        to_query = torch.empty_like(query)
        to_sinks = None if sinks is None else torch.zeros_like(sinks)
        all_keys, all_values = gathered(key, value, chunks, ctx.group)
        # of keys and values, row by row
        total = all_keys.new_zeros(*all_keys.shape[:2], 2 * width)
        of_key, of_value = total.split(width, -1)
        for chunk, seeds in zip(chunks.batches, ctx.seeds, strict=True):
            grad, own, values = (
                x[chunk.queries].transpose(1, 2) for x in (grads[0], query, attended)
            )
            done = Attended(values, sums[chunk.queries].transpose(1, 2).contiguous(), seeds)
            keys = chunk.of_keys(all_keys)
            found = attend_backward(grad, own, keys, chunk.of_keys(all_values), done, ctx.scale)
            to_query[chunk.queries] = found.query.transpose(1, 2)
            count = keys.shape[2]
            split = count - own.shape[2]
            if found.before is not None:
                chunk.among(0, split).add(of_key, found.before[0])
                chunk.among(0, split).add(of_value, found.before[1])
            chunk.among(split, count).add(of_key, found.own[0])
            chunk.among(split, count).add(of_value, found.own[1])
            if to_sinks is not None:
                to_sinks += gradient_of_sinks(grad, done, sinks)
        del all_keys, all_values, keys
        if not any(ctx.needs_input_grad[1:3]):  # the same on all processes
            return to_query, None, None, None, None, None, to_sinks
        by_process = torch.empty_like(total)
        by_process[chunks.order] = total
        del total, of_key, of_value
        mine = tensor_parallel.reduce_scatter_to_sequence_parallel_region(
            by_process, group=ctx.group
        )
        return to_query, *mine.split(width, -1), None, None, None, to_sinks
