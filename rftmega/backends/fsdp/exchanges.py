"""Differentiable collectives over a tensor-parallel group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Copied(torch.autograd.Function):
    """_Copied returns its input, a replicated tensor; the backward pass sums the gradient over the
    processes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):
    """_Summed sums the processes' tensors; the backward pass returns the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Joined(torch.autograd.Function):
    """_Joined concatenates the processes' columns [..., C]; the backward pass takes this process's
    columns of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _own(grads[0], ctx.group), None


class _OwnColumns(torch.autograd.Function):
    """_OwnColumns takes this process's columns of a replicated tensor; the backward pass
    concatenates the processes' gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _own(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all(grads[0], ctx.group), None


def _all(x: Tensor, group: Any) -> Tensor:
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _own(x: Tensor, group: Any) -> Tensor:
    return x.chunk(group.size(), dim=-1)[group.rank()].contiguous()


def copied(x: Tensor, group: Any) -> Tensor:
    """Returns x, which is the same on every process of `group`; the backward pass sums the
    processes' gradients of x.
    """
    found: Tensor = _Copied.apply(x, group)
    return found


def summed(x: Tensor, group: Any) -> Tensor:
    """Returns the sum of x over the processes of `group`, computed in place if x is contiguous."""
    found: Tensor = _Summed.apply(x.contiguous(), group)
    return found


def joined(x: Tensor, group: Any) -> Tensor:
    """Returns [..., C * processes]: the columns x [..., C] of all processes of `group`,
    concatenated.
    """
    found: Tensor = _Joined.apply(x, group)
    return found


def own_columns(x: Tensor, group: Any) -> Tensor:
    """Returns this process's columns [..., C / processes] of x [..., C], which is the same on every
    process of `group`.
    """
    found: Tensor = _OwnColumns.apply(x, group)
    return found
