"""Log-probabilities and entropy straight from hidden states: the logits exist for a chunk of tokens
at a time.

Legend: N tokens, H hidden size, V this rank's part of the vocabulary, c tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1024  # tokens whose logits exist at once: memory is O(CHUNK x V), whatever N is


class VocabularyShard(NamedTuple):
    """VocabularyShard says which columns of the vocabulary a rank holds."""

    first: int  # id of the first column
    real: int  # columns that are words; those behind them are padding
    group: Any  # the tensor-parallel group; None for a group of one

    @classmethod
    def of_rank(cls, width: int, *, vocabulary: int, rank: int, group: Any) -> "VocabularyShard":
        """Returns the place of this rank's `width` columns in `group`.

        `vocabulary` is the true size.
        """
        return cls(rank * width, max(0, min(width, vocabulary - rank * width)), group)


def linear_stats(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature: float | Tensor,
    shard: VocabularyShard,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Returns (log-prob of each target, entropy), both [N] float32, of softmax(hidden @ weight.T /
    temperature); differentiable.

    `temperature` is one for all tokens or [N]. Padding columns are out of the softmax and get zero
    gradient. The gradient of `hidden` is this rank's share: a sum over the tensor-parallel ranks is
    the caller's (Megatron's mappings do it).
    """
    if not isinstance(temperature, Tensor):
        temperature = hidden_NH.new_full((), temperature, dtype=torch.float32)
    return _LinearStats.apply(
        hidden_NH, weight_VH, targets_N, temperature.expand(len(hidden_NH)), shard, chunk
    )


class _LinearStats(torch.autograd.Function):
    """With p the softmax and H its entropy: d logp / d logit = [target] - p, d H / d logit = -p
    (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        shard: VocabularyShard,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        largest, sums, last = _local_sums(hidden, weight, targets, temperature, shard, chunk)
        top = largest.clone()
        _reduce(top, shard.group, dist.ReduceOp.MAX)
        shift = largest - top  # from this rank's largest logit to the largest of all
        scale = shift.exp()
        normaliser, weighted, target = sums
        # A rank of padding only has -inf as its largest: its sums are 0, and 0 * -inf is not.
        totals = torch.stack(
            [
                scale * normaliser,
                scale * (weighted + torch.where(normaliser > 0, shift, 0.0) * normaliser),
                target,
            ]
        )
        _reduce(totals, shard.group, dist.ReduceOp.SUM)
        normaliser, weighted, target = totals
        log_normaliser = normaliser.log() + top
        logp = target - log_normaliser
        entropy = normaliser.log() - weighted / normaliser
        if last is not None:
            last += (largest - log_normaliser)[-len(last) :, None]
        ctx.save_for_backward(hidden, weight, targets, temperature, log_normaliser, entropy, last)
        ctx.shard, ctx.chunk = shard, chunk
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, log_normaliser, entropy, last = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        grad_hidden = torch.empty_like(hidden)
        learns = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        parts = _parts(len(hidden), ctx.chunk)
        for part in parts:
            if last is not None and part is parts[-1]:
                log_p = last
            else:
                log_p = _logits(hidden[part], weight, temperature[part], ctx.shard).sub_(
                    log_normaliser[part, None]
                )
            grad = log_p.exp()
            pull = (
                torch.zeros_like(log_normaliser[part])
                if grad_logp is None
                else grad_logp[part] / temperature[part]
            )
            if grad_entropy is None:
                grad.mul_(-pull[:, None])
            else:
                log_p[:, ctx.shard.real :] = 0.0  # p is 0 there, and 0 * -inf is not
                spread = log_p.add_(entropy[part, None]).mul_(
                    (grad_entropy[part] / temperature[part])[:, None]
                )
                grad.mul_(spread.add_(pull[:, None]).neg_())
            column, held = _columns(targets[part], ctx.shard)
            grad.scatter_add_(-1, column, (pull * held)[:, None])
            grad = grad.to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is None:  # a frozen one
                continue
            if weight.dtype == torch.float32:
                grad_weight.addmm_(grad.T, hidden[part])
            else:
                grad_weight += grad.T @ hidden[part]
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, of_weight, None, None, None, None


def _local_sums(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    shard: VocabularyShard,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns this rank's largest logit m [N], and [3, N]: sum of exp(x - m), sum of exp(x - m) (x
    - m), the target's logit or 0.

    Third, x - m of the last chunk [c, V]: it costs no more than a chunk does anyway, and backward
    need not compute it again.
    """
    last = None
    largest = hidden.new_empty(len(hidden), dtype=torch.float32)
    sums = hidden.new_empty(3, len(hidden), dtype=torch.float32)
    for part in _parts(len(hidden), chunk):
        logits = _logits(hidden[part], weight, temperature[part], shard)
        column, held = _columns(targets[part], shard)
        sums[2, part] = torch.where(held, logits.gather(-1, column)[:, 0], 0.0)
        if shard.real == 0:
            largest[part], sums[:2, part] = -torch.inf, 0.0
            continue
        words = logits[:, : shard.real]
        largest[part] = words.max(-1).values
        words -= largest[part, None]
        last = logits
        p = words.exp()
        sums[0, part] = p.sum(-1)
        sums[1, part] = p.mul_(words).sum(-1)
    return largest, sums, last


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor, shard: VocabularyShard) -> Tensor:
    """Returns [c, V] float32, -inf on padding."""
    logits = (hidden @ weight.T).float().div_(temperature[:, None])
    logits[:, shard.real :] = -torch.inf
    return logits


def _columns(targets: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Returns each target's column here [c, 1] (0 where another rank has it), and whether it is
    here [c].
    """
    local = targets - shard.first
    held = (local >= 0) & (local < shard.real)
    return torch.where(held, local, 0)[:, None], held


def _parts(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, tokens, chunk)]


def _reduce(x: Tensor, group: Any, op: Any) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
