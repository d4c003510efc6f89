"""An LM head whose logits are computed for one chunk of positions at a time, and the gradients of its
tensors. The kernels of distillation (divergence, likeliest tokens) share it.
Legend: N positions, H hidden size, V this rank's columns of the vocabulary, c positions of a chunk.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.models.kernels.linear_log_probs import (
    VocabularyShard,
    add_product,
    reduce,
    zeros_for,
)


class Head(NamedTuple):
    """Head holds an LM head's tensors: x = hidden @ weight.T + bias, plus inner @ up.T of a LoRA
    pair. The logits are factor * x or, with a `cap`, factor * cap * tanh(x / cap).
    """

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    pair: tuple[Tensor, Tensor] | None = None  # inner [N, r], up [V, r]
    cap: float | None = None
    factor: float = 1.0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Returns weight, bias, inner and up; None for each that the head does not have."""
        inner, up = self.pair or (None, None)
        return self.weight, self.bias, inner, up

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> "Head":
        """Returns the head with other `tensors`, in the order of the property `tensors`."""
        weight, bias, inner, up = tensors
        assert weight is not None
        pair = None if inner is None or up is None else (inner, up)
        return self._replace(weight=weight, bias=bias, pair=pair)

    def without_tensors(self) -> "Head":
        """Returns the head with its numbers only (factor, cap); autograd keeps the tensors
        separately.
        """
        return self._replace(weight=torch.empty(0), bias=None, pair=None)

    def detached(self) -> "Head":
        """Returns the head without gradients."""
        return self.with_tensors([None if x is None else x.detach() for x in self.tensors])

    def logits(self, hidden: Tensor, part: slice, temperature: Tensor) -> Tensor:
        """Returns the logits [c, V], in float32 and divided by each position's temperature, of the
        positions `part`; `hidden` [N, H], `temperature` [N].
        """
        made = (hidden[part].to(self.weight.dtype) @ self.weight.T).float()
        if self.bias is not None:
            made += self.bias
        if self.pair is not None:
            made += self.pair[0][part] @ self.pair[1].T
        if self.cap is not None:
            made.div_(self.cap).tanh_().mul_(self.cap)
        return made.mul_((self.factor / temperature[part])[:, None])

    def before_scale(self, grad: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
        """Returns the gradient with respect to x, given that with respect to the `logits` [c, V] of
        positions with these `temperature`s [c]; changes `grad`.
        """
        scale = (self.factor / temperature)[:, None]
        if self.cap is not None:  # of cap * tanh(x / cap): 1 - tanh(x / cap)^2
            grad *= 1.0 - (logits / (scale * self.cap)).square()
        return grad.mul_(scale)


class HeadGradients:
    """HeadGradients accumulates the gradients of hidden states and of a head, chunk by chunk."""

    def __init__(self, hidden: Tensor, head: Head, needed: Sequence[bool]):
        """`hidden` [N, H]; `needed`: for each of the head's tensors, whether it is trained."""
        self.given, self.head = hidden, head
        weight, bias, inner, up = head.tensors
        self.hidden = torch.empty_like(hidden)
        self.inner = None if inner is None else torch.empty_like(inner)
        self.weight = zeros_for(weight, needed[0])
        self.bias = zeros_for(bias, needed[1])
        self.up = zeros_for(up, needed[3])

    def add(self, part: slice, grad: Tensor) -> None:
        """Adds the gradient with respect to x of the positions `part`, [c, V]."""
        weight, _, inner, up = self.head.tensors
        assert weight is not None
        grad = grad.to(weight.dtype)
        self.hidden[part] = grad @ weight
        if self.weight is not None:
            add_product(self.weight, grad.T, self.given[part].to(weight.dtype))
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=torch.float32)
        if self.inner is not None and up is not None:
            self.inner[part] = grad @ up
        if self.up is not None and inner is not None:
            add_product(self.up, grad.T, inner[part])

    def result(self) -> tuple[Tensor | None, ...]:
        """Returns the gradients of hidden states, weight, bias, inner and up, in their dtypes."""
        made = (self.weight, self.bias, self.inner, self.up)
        pairs = zip(made, self.head.tensors, strict=True)
        return self.hidden, *[
            None if grad is None or own is None else grad.to(own.dtype) for grad, own in pairs
        ]


def log_sum(logits: Tensor, shard: VocabularyShard) -> Tensor:
    """Returns log(sum of exp(logits)) [c] over the real columns of all tensor-parallel ranks."""
    real = logits[:, : shard.real]
    if shard.group is None or shard.group.size() == 1:
        return real.logsumexp(-1)
    top = real.max(-1).values if shard.real else logits.new_full((len(logits),), -math.inf)
    reduce(top, shard.group, dist.ReduceOp.MAX)
    total = (real - top[:, None]).exp().sum(-1)
    reduce(total, shard.group, dist.ReduceOp.SUM)
    return total.log() + top
