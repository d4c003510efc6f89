"""Computes the log-probs of a few chosen tokens per position, and of all others together, directly
from hidden states, with the logits of only one chunk of positions in memory at a time.
Legend: N positions, K chosen tokens, V this rank's columns of the vocabulary, c positions of a
chunk.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from rftmega.models.kernels.chunked_head import Head, HeadGradients, log_sum
from rftmega.models.kernels.linear_log_probs import CHUNK, VocabularyShard, parts_of, reduce


def linear_buckets(
    hidden_NH: Tensor,
    head: Head,
    ids_NK: Tensor,
    temperature: float | Tensor,
    shard: VocabularyShard,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """Returns [N, K + 1] float32: the log-probs of the token ids `ids_NK` [N, K], which differ
    within a row, and as the last column the log-prob of all other tokens of the vocabulary
    together (the tail); differentiable with respect to the hidden states and the head.

    Other arguments and gradients are those of `linear_divergence`. The tail is summed over the
    other tokens, not computed as 1 minus the chosen ones, so that small tails are exact.
    """
    if not isinstance(temperature, Tensor):
        temperature = hidden_NH.new_full((), temperature, dtype=torch.float32)
    of_positions = temperature.expand(len(hidden_NH))
    given = _Given(head.without_tensors(), shard, chunk)
    found: Tensor = _LinearBuckets.apply(given, hidden_NH, *head.tensors, of_positions, ids_NK)
    return found


@torch.no_grad()
def largest_buckets(
    hidden_NH: Tensor,
    head: Head,
    k: int,
    temperature: float | Tensor,
    shard: VocabularyShard,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Returns the `k` likeliest token ids of each position, [N, K] int64, likeliest first, and
    their log-probs with the tail's, [N, K + 1] float32; see `linear_buckets`.
    """
    if not isinstance(temperature, Tensor):
        temperature = hidden_NH.new_full((), temperature, dtype=torch.float32)
    of_positions = temperature.expand(len(hidden_NH))
    ids = hidden_NH.new_zeros(len(hidden_NH), k, dtype=torch.int64)
    for part in parts_of(len(hidden_NH), chunk):
        real = head.logits(hidden_NH, part, of_positions)[:, : shard.real]
        values, columns = real.topk(min(k, shard.real), dim=-1)
        ids[part] = _of_all_ranks(values, columns + shard.first, k, shard)
    return ids, linear_buckets(hidden_NH, head, ids, temperature, shard, chunk=chunk)


def _of_all_ranks(values: Tensor, ids: Tensor, k: int, shard: VocabularyShard) -> Tensor:
    """Returns the ids of the `k` largest values of all tensor-parallel ranks, [c, k]."""
    if shard.group is None or shard.group.size() == 1:
        return ids
    missing = k - values.shape[1]  # a rank may hold fewer columns
    values = functional.pad(values, (0, missing), value=-torch.inf)
    ids = functional.pad(ids, (0, missing))
    all_values = [torch.empty_like(values) for _ in range(shard.group.size())]
    all_ids = [torch.empty_like(ids) for _ in all_values]
    dist.all_gather(all_values, values, group=shard.group)
    dist.all_gather(all_ids, ids, group=shard.group)
    best = torch.cat(all_values, -1).topk(k, dim=-1).indices
    return torch.cat(all_ids, -1).gather(-1, best)


class _Given(NamedTuple):
    """_Given holds the arguments of `linear_buckets` that are no tensors; the head has none."""

    head: Head
    shard: VocabularyShard
    chunk: int


class _LinearBuckets(torch.autograd.Function):
    """_LinearBuckets implements `linear_buckets`. With p the softmax, t the tail's probability and
    g the gradients of the K + 1 log-probs, the gradient with respect to a logit is g [chosen] + g_t
    p / t [not chosen] - p (sum of g).
    """

    @staticmethod
    def forward(ctx: Any, given: _Given, *tensors: Tensor) -> Tensor:
        hidden, *of_head, temperature, ids = tensors
        head, shard = given.head.with_tensors(of_head), given.shard
        buckets = hidden.new_zeros(len(ids), ids.shape[1] + 1, dtype=torch.float32)
        normaliser = hidden.new_zeros(len(ids), dtype=torch.float32)
        for part in parts_of(len(ids), given.chunk):
            logits = head.logits(hidden, part, temperature)
            normaliser[part] = log_sum(logits, shard)
            columns, held = _columns(ids[part], shard)
            chosen = torch.where(held, logits.gather(-1, columns), 0.0)
            reduce(chosen, shard.group, dist.ReduceOp.SUM)
            others = logits.masked_fill_(_marked(logits, columns, held), -torch.inf)
            tail = log_sum(others, shard)
            buckets[part] = torch.cat([chosen, tail[:, None]], -1) - normaliser[part, None]
        ctx.save_for_backward(*tensors, buckets, normaliser)
        ctx.given = given
        return buckets

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given: _Given = ctx.given
        hidden, *of_head, temperature, ids, buckets, normaliser = ctx.saved_tensors
        head, shard = given.head.with_tensors(of_head), given.shard
        total = HeadGradients(hidden, head, ctx.needs_input_grad[2:6])
        for part in parts_of(len(ids), given.chunk):
            logits = head.logits(hidden, part, temperature)
            pull, tail = grads[0][part], buckets[part, -1]
            p = (logits - normaliser[part, None]).exp()
            p[:, shard.real :] = 0.0
            columns, held = _columns(ids[part], shard)
            # an empty tail (-inf) has no gradient
            share = torch.where(tail > -torch.inf, pull[:, -1] * (-tail).exp(), 0.0)
            of_others = torch.where(_marked(logits, columns, held), 0.0, share[:, None])
            grad = p * (of_others - pull.nan_to_num().sum(-1, keepdim=True))
            grad.scatter_add_(-1, columns, torch.where(held, pull[:, :-1], 0.0))
            total.add(part, head.before_scale(grad, logits, temperature[part]))
        return None, *total.result(), None, None


def _columns(ids: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Returns the column of each id in this rank's shard (0 if another rank holds it), and whether
    this rank holds it, both [c, K].
    """
    local = ids - shard.first
    held = (local >= 0) & (local < shard.real)
    return torch.where(held, local, 0), held


def _marked(logits: Tensor, columns: Tensor, held: Tensor) -> Tensor:
    """Returns a mask [c, V] that is True at the columns that this rank holds of the chosen ids."""
    counts = torch.zeros_like(logits, dtype=torch.int8)
    return counts.scatter_add_(-1, columns, held.to(torch.int8)).bool()
