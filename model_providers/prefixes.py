"""Causal attention of queries whose row began before them, by kernels that never hold a score for longer than a block.

Those kernels know a square under the diagonal and a rectangle without a mask. A chunk of a row needs both: all that came before
it, and itself. Each half gives its output and the logarithm of its softmax's denominator, from which the whole follows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
WIDEST = 256  # heads, of CUDA's kernel


def has_kernel(query: Tensor) -> bool:
    """Whether the kernels take tensors like this, without dropout: on CUDA they are of half precision and narrow heads."""
    if query.device.type != "cuda":
        return True
    return query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= WIDEST


def attend_to_prefix(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """[b, heads, q, d] over [b, groups, k, d], q below k -> [b, heads, q, d of values]; the last query sees the last key."""
    width = value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    widest = -(-max(query.shape[-1], width) // 8) * 8  # one width for all, which CUDA's kernel can load
    query, key, value = (F.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    attended: Tensor = _Joined.apply(query, key, value, scale)
    return attended[..., :width]


class _Joined(torch.autograd.Function):
    """The softmax over both halves is each half's, weighted by its share of the denominator; so is the backward pass, where a
    kernel that is given the whole's output and denominator computes its half's gradients.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.split = scale, key.shape[2] - query.shape[2]
        halves = [_forward(query, *_wide(query, *half), causal, scale) for *half, causal in _halves(key, value, ctx.split)]
        ctx.seeds = [seeds for _, _, seeds in halves]
        denominator = torch.logaddexp(halves[0][1], halves[1][1])
        shares = [out.to(denominator.dtype) * (part - denominator).exp()[..., None] for out, part, _ in halves]
        attended = (shares[0] + shares[1]).to(query.dtype)
        ctx.save_for_backward(query, key, value, attended, denominator)
        return attended

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, attended, denominator = ctx.saved_tensors
        groups = key.shape[1]
        found = []
        for (*half, causal), seeds in zip(_halves(key, value, ctx.split), ctx.seeds, strict=True):
            wide = _wide(query, *half)
            found.append(_backward(grads[0], query, *wide, attended, denominator, seeds, causal, ctx.scale))
        to_query = found[0][0] + found[1][0]
        to_key, to_value = (
            torch.cat([half[n].unflatten(1, (groups, -1)).sum(2) for half in found], 2) for n in (1, 2)
        )  # a group's heads share its keys
        return to_query, to_key, to_value, None


def _halves(key: Tensor, value: Tensor, split: int) -> tuple[tuple[Tensor, Tensor, bool], tuple[Tensor, Tensor, bool]]:
    return (key[:, :, :split], value[:, :, :split], False), (key[:, :, split:], value[:, :, split:], True)


def _wide(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A key and a value for every head."""
    repeat = query.shape[1] // key.shape[1]
    return (key, value) if repeat == 1 else (key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1))


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """(output, logarithms of the denominators [b, heads, q], what the backward pass wants besides)."""
    if query.device.type == "cuda":
        out, denominator, *seeds, _ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        return out, denominator, tuple(seeds)
    return *aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale), ()


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
    given = (grad.contiguous(), query, key, value, attended, denominator)
    if query.device.type == "cuda":
        *lengths, seed, offset = seeds
        arguments: tuple[Any, ...] = (*lengths, 0.0, causal, seed, offset)
        kernel: Any = aten._scaled_dot_product_flash_attention_backward
    else:
        kernel, arguments = aten._scaled_dot_product_flash_attention_for_cpu_backward, (0.0, causal)
    return kernel(*given, *arguments, scale=scale)  # type: ignore[no-any-return]
