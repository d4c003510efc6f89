"""Causal attention of queries in the middle of a row, by kernels that never materialise the scores.

Those kernels support a square with a causal mask and a rectangle without a mask. A chunk of a row
needs both: all that came before it, and itself. Each half returns its output and the logarithm of
its softmax's denominator, from which the whole follows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
WIDEST = 256  # largest head size of CUDA's kernel


def has_kernel(query: Tensor) -> bool:
    """Returns whether the kernels support such tensors, without dropout: on CUDA in half precision,
    with head sizes up to WIDEST.
    """
    if query.device.type != "cuda":
        return True
    return query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= WIDEST


def attend_to_prefix(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None
) -> Tensor:
    """Computes attention of [b, heads, q, d] over [b, groups, k, d], q below k, to [b, heads, q, d
    of values].

    The last query sees the last key.
    """
    width = value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # one size for all, which CUDA's kernel can load
    widest = -(-max(query.shape[-1], width) // 8) * 8
    query, key, value = (F.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    attended: Tensor = _Joined.apply(query, key, value, scale)
    return attended[..., :width]


class _Joined(torch.autograd.Function):
    """_Joined computes the softmax over both halves: each half's output is weighted by its share of
    the denominator.

    So is the backward pass, where a kernel that gets the whole's output and denominator computes
    its half's gradients.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.split = scale, key.shape[2] - query.shape[2]
        groups = key.shape[1]
        before, own = _halves(key, value, ctx.split)
        first, first_sum, seeds = _forward(_behind(query, groups), *before, False, scale)
        first, first_sum = _beside(first, query), _beside(first_sum, query)
        second, second_sum, more_seeds = _forward(query, *_wide(query, *own), True, scale)
        ctx.seeds = (seeds, more_seeds)
        denominator = torch.logaddexp(first_sum, second_sum)
        shares = [(part - denominator).exp()[..., None] for part in (first_sum, second_sum)]
        attended = (first * shares[0] + second * shares[1]).to(query.dtype)
        ctx.save_for_backward(query, key, value, attended, denominator)
        return attended

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, attended, denominator = ctx.saved_tensors
        groups = key.shape[1]
        before, own = _halves(key, value, ctx.split)
        grad, whole, sums = (_behind(x, groups) for x in (grads[0], attended, denominator))
        first = _backward(
            grad, _behind(query, groups), *before, whole, sums, ctx.seeds[0], False, ctx.scale
        )
        second = _backward(
            grads[0],
            query,
            *_wide(query, *own),
            attended,
            denominator,
            ctx.seeds[1],
            True,
            ctx.scale,
        )
        to_query = _beside(first[0], query) + second[0]
        # summed over the heads of a group
        shared = (x.unflatten(1, (groups, -1)).sum(2) for x in second[1:])
        to_key, to_value = (torch.cat(both, 2) for both in zip(first[1:], shared, strict=True))
        return to_query, to_key, to_value, None


def _halves(
    key: Tensor, value: Tensor, split: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return (key[:, :, :split], value[:, :, :split]), (key[:, :, split:], value[:, :, split:])


def _behind(x: Tensor, groups: int) -> Tensor:
    """Maps [b, heads, q, ...] to [b, groups, heads of a group * q, ...].

    Without a mask these are more queries of one head, and no key need be copied for each.
    """
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def _beside(x: Tensor, query: Tensor) -> Tensor:
    """Maps the result of `_behind` back to the heads of `query`."""
    return x.unflatten(2, (-1, query.shape[2])).flatten(1, 2)


def _wide(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats keys and values for every head."""
    repeat = query.shape[1] // key.shape[1]
    return (
        (key, value)
        if repeat == 1
        else (key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1))
    )


def _forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Returns (output, logarithms of the denominators [b, heads, q], further inputs of the backward
    pass).
    """
    if query.device.type == "cuda":
        out, denominator, *seeds, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scale
        )
        return out, denominator, tuple(seeds)
    return *aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    ), ()


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    denominator: Tensor,
    seeds: tuple[Any, ...],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    given = (grad.contiguous(), query, key, value, attended, denominator.contiguous())
    if query.device.type == "cuda":
        *lengths, seed, offset = seeds
        arguments: tuple[Any, ...] = (*lengths, 0.0, causal, seed, offset)
        kernel: Any = aten._scaled_dot_product_flash_attention_backward
    else:
        kernel, arguments = aten._scaled_dot_product_flash_attention_for_cpu_backward, (0.0, causal)
    return kernel(*given, *arguments, scale=scale)  # type: ignore[no-any-return]
