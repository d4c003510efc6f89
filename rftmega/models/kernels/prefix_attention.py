"""Causal attention of a whole sequence, or of a chunk of queries in the middle of one, with kernels
that never materialise the scores; also with attention sinks.

Such kernels support a square with a causal mask or a rectangle without a mask. A chunk needs both:
the rectangle for all earlier keys, the square for its own. Each returns its output and the
logarithm of its softmax denominator, from which the joint result is computed.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
WIDEST = 256  # largest head size of CUDA's kernel


def has_kernel(query: Tensor) -> bool:
    """Returns whether the attention kernels support this query tensor, without dropout: on CUDA in
    half precision, with head sizes up to WIDEST; on a CPU always.
    """
    if query.device.type != "cuda":
        return True
    return query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= WIDEST


def attend_to_prefix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes causal attention of a chunk's queries [b, heads, q, d] over keys and values [b,
    groups, k, d] of the chunk and of the tokens before it, q <= k, and returns [b, heads, q, d of
    values].

    The last query attends to all keys, the one before to all but the last key, and so on. `scale`:
    factor of the scores, by default d^-0.5. `sinks`: a score per head [heads] that counts in the
    softmax's denominator only.
    """
    width = value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attended: Tensor = _Joined.apply(*padded_heads(query, key, value), scale, sinks)
    return attended[..., :width]


def padded_heads(*tensors: Tensor) -> list[Tensor]:
    """Returns the tensors [..., d] with zeros behind the values of each head, up to one size for
    all tensors that CUDA's kernel can load: a multiple of 8. A tensor of this size is not copied.
    """
    widest = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in tensors]


class Attended(NamedTuple):
    """Attended is the attention of a chunk's queries, with what its backward pass needs."""

    values: Tensor  # [b, heads, q, d]
    denominator: Tensor  # [b, heads, q]: logarithms of the softmax denominators
    seeds: tuple[tuple[Any, ...], ...]  # further inputs of the kernel's backward pass, by half


class KeyGradients(NamedTuple):
    """KeyGradients are the gradients of a chunk's queries [b, heads, q, d], and of the keys and
    values [b, groups, k, d] before the chunk and in it.
    """

    query: Tensor
    before: tuple[Tensor, Tensor] | None  # None: there are none before the chunk
    own: tuple[Tensor, Tensor]


def attend_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None
) -> Attended:
    """Computes causal attention as `attend_to_prefix` does, without a gradient, for heads of one
    size: over the keys before the chunk (no mask) and over the chunk's own keys (causal mask). The
    output of each half is weighted by its share of the softmax denominator. Sinks are a part of
    the denominator.
    """
    groups, split = key.shape[1], key.shape[2] - query.shape[2]
    before, own = _halves(key, value, split)
    second, second_sum, more_seeds = _forward(query, *_wide(query, *own), True, scale)
    parts, seeds = [(second, second_sum)], [more_seeds]
    if split:
        first, first_sum, first_seeds = _forward(_behind(query, groups), *before, False, scale)
        parts.append((_beside(first, query), _beside(first_sum, query)))
        seeds.append(first_seeds)
    sums = [each for _, each in parts]
    if sinks is not None:
        sums.append(sinks.to(second_sum.dtype)[:, None].expand_as(second_sum))
    denominator = functools.reduce(torch.logaddexp, sums)
    shares = [part * (each - denominator).exp()[..., None] for part, each in parts]
    values = functools.reduce(torch.add, shares).to(query.dtype)
    return Attended(values, denominator, tuple(seeds))


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
) -> KeyGradients:
    """Returns the gradients of the inputs of `attend_forward`, whose result was `attended`: a
    kernel that gets the joint output and denominator computes the gradients of its half.
    """
    groups, split = key.shape[1], key.shape[2] - query.shape[2]
    before, own = _halves(key, value, split)
    result = attended.values, attended.denominator
    to_query, *second = _backward(
        grad, query, *_wide(query, *own), *result, attended.seeds[0], True, scale
    )
    # summed over the heads of a group
    to_key, to_value = (x.unflatten(1, (groups, -1)).sum(2) for x in second)
    if not split:
        return KeyGradients(to_query, None, (to_key, to_value))
    many, queries, values, sums = (_behind(x, groups) for x in (grad, query, *result))
    first = _backward(many, queries, *before, values, sums, attended.seeds[1], False, scale)
    return KeyGradients(
        _beside(first[0], query) + to_query, (first[1], first[2]), (to_key, to_value)
    )


class _Joined(torch.autograd.Function):
    """_Joined is `attend_forward` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        found = attend_forward(query, key, value, scale, sinks)
        ctx.scale, ctx.seeds = scale, found.seeds
        ctx.save_for_backward(query, key, value, found.values, found.denominator, sinks)
        return found.values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None]:
        query, key, value, values, denominator, sinks = ctx.saved_tensors
        attended = Attended(values, denominator, ctx.seeds)
        found = attend_backward(grads[0], query, key, value, attended, ctx.scale)
        to_key, to_value = found.own
        if found.before is not None:
            to_key = torch.cat([found.before[0], to_key], 2)
            to_value = torch.cat([found.before[1], to_value], 2)
        to_sinks = None if sinks is None else gradient_of_sinks(grads[0], attended, sinks)
        return found.query, to_key, to_value, None, to_sinks


def gradient_of_sinks(grad: Tensor, attended: Attended, sinks: Tensor) -> Tensor:
    """Returns the gradient of the sinks [heads]: a sink's share takes from all weights of its head."""
    denominator = attended.denominator
    share = (sinks.to(denominator.dtype)[:, None] - denominator).exp()
    taken = (grad.to(denominator.dtype) * attended.values).sum(-1)
    return -(share * taken).sum((0, 2)).to(sinks.dtype)


def _halves(
    key: Tensor, value: Tensor, split: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return (key[:, :, :split], value[:, :, :split]), (key[:, :, split:], value[:, :, split:])


def _behind(x: Tensor, groups: int) -> Tensor:
    """Maps [b, heads, q, ...] to [b, groups, heads of a group * q, ...].

    Without a mask, the queries of all heads in a group are like more queries of one head, so keys
    need not be repeated.
    """
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def _beside(x: Tensor, query: Tensor) -> Tensor:
    """Maps [b, groups, heads of a group * q, ...] back to [b, heads, q, ...]: the inverse of
    `_behind`.
    """
    return x.unflatten(2, (-1, query.shape[2])).flatten(1, 2)


def _wide(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats keys and values for every query head of their group."""
    repeat = query.shape[1] // key.shape[1]
    return (
        (key, value)
        if repeat == 1
        else (key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1))
    )


def _forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Runs the attention kernel, with a causal mask if `causal`, otherwise without a mask; returns
    (output, logarithms of the softmax denominators [b, heads, q], further inputs of the backward
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
