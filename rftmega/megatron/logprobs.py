"""Log-probabilities and entropy from logits that are sharded over the vocabulary.

Legend: N tokens, V this rank's part of the vocabulary. `group` None is a group of one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_stats(
    logits_NV: Tensor, targets_N: Tensor, *, temperature: float, vocabulary: int, rank: int, group: Any
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy), both [N] float32, of softmax(logits / temperature); differentiable.

    The logits are left as they are. `vocabulary` is the true size: columns at and beyond it (padding, on the last ranks)
    are out of the softmax and get zero gradient. `rank` is this process's place in `group`.
    """
    width = logits_NV.shape[-1]
    real = max(0, min(width, vocabulary - rank * width))
    return _VocabParallel.apply(logits_NV, targets_N - rank * width, temperature, real, group)


class _VocabParallel(torch.autograd.Function):
    """With p the softmax and H its entropy: d logp / d logit = [target] - p, d H / d logit = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, local_targets_N: Tensor, temperature: float, real: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        x = logits_NV.to(torch.float32, copy=True).div_(temperature)
        x[:, real:] = -torch.inf
        largest = x.max(-1).values
        _reduce(largest, group, dist.ReduceOp.MAX)
        x -= largest[:, None]
        held = (local_targets_N >= 0) & (local_targets_N < real)
        column = torch.where(held, local_targets_N, 0)[:, None]
        target = torch.where(held, x.gather(-1, column)[:, 0], 0.0)
        p = x.exp()
        x[:, real:] = 0.0  # exp(-inf) * -inf is NaN
        totals = torch.stack([p.sum(-1), target, (p * x).sum(-1)])
        _reduce(totals, group, dist.ReduceOp.SUM)
        normaliser, target, mean_logit = totals
        p /= normaliser[:, None]
        logp = target - normaliser.log()
        entropy = normaliser.log() - mean_logit / normaliser
        ctx.save_for_backward(p, column, held, entropy)
        ctx.temperature, ctx.dtype = temperature, logits_NV.dtype
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logp, grad_entropy = grads
        p, column, held, entropy = ctx.saved_tensors
        grad = torch.zeros_like(p)
        if grad_logp is not None:
            grad -= grad_logp[:, None] * p
            grad.scatter_add_(-1, column, (grad_logp * held)[:, None])
        if grad_entropy is not None:
            grad -= grad_entropy[:, None] * (torch.xlogy(p, p) + p * entropy[:, None])
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None, None, None


def _reduce(x: Tensor, group: Any, op: Any) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
