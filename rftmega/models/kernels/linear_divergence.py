"""Computes divergences between two models' distributions directly from their hidden states, with
the logits of only one chunk of positions in memory at a time.
Legend: N positions, H and G hidden sizes of student and teacher, V this rank's columns of the
vocabulary, c positions of a chunk.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.models.kernels.chunked_head import Head, HeadGradients, log_sum
from rftmega.models.kernels.linear_log_probs import CHUNK, VocabularyShard, fused, parts_of, reduce

Name = Literal["reverse_kl", "forward_kl", "jsd"]


class DivergenceKind(NamedTuple):
    """DivergenceKind selects the divergence between the distributions of student p and teacher q.

    reverse_kl is KL(p || q), forward_kl is KL(q || p), and jsd is the generalised Jensen-Shannon
    divergence beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p
    (arXiv:2306.13649, eq. 1), for beta between 0 and 1.
    """

    name: Name = "reverse_kl"
    beta: float = 0.5


def linear_divergence(
    student_NH: Tensor,
    teacher_NG: Tensor,
    head: Head,
    teacher_head: Head,
    divergence: DivergenceKind,
    temperature: float | Tensor,
    shard: VocabularyShard,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """Returns the divergence between the student's and the teacher's distribution at each position,
    [N] float32; differentiable with respect to the student's hidden states and head.

    Distributions are softmax(logits / temperature) over the vocabulary of `shard`, whose columns
    both heads hold in the same order: rows of `teacher_head.weight` are those of the same token
    ids, however many tensor-parallel ranks the teacher itself has. `temperature` is one for all
    positions or [N]. `chunk`: number of positions whose logits are computed at once. Padding
    columns (from `shard.real` on) are excluded and get zero gradient. The gradients of the hidden
    states and of the pair's inner tensor are this rank's contributions: the caller sums them over
    the tensor-parallel ranks.
    """
    if not isinstance(temperature, Tensor):
        temperature = student_NH.new_full((), temperature, dtype=torch.float32)
    of_positions = temperature.expand(len(student_NH))
    taught = teacher_NG.detach(), *teacher_head.detached().tensors
    plain = head.without_tensors(), teacher_head.without_tensors()
    given = _Given(*plain, divergence, shard, chunk)
    found: Tensor = _LinearDivergence.apply(given, student_NH, *head.tensors, of_positions, *taught)
    return found


class _Given(NamedTuple):
    """_Given holds the arguments of `linear_divergence` that are no tensors; the heads have none."""

    head: Head
    teacher_head: Head
    divergence: DivergenceKind
    shard: VocabularyShard
    chunk: int


class _LinearDivergence(torch.autograd.Function):
    """_LinearDivergence implements `linear_divergence`: with D = sum of f(p, q) over the vocabulary
    and g = df / dp, the gradient with respect to a logit is p (g - sum of p g).
    """

    @staticmethod
    def forward(ctx: Any, given: _Given, *tensors: Tensor) -> Tensor:
        hidden, head, temperature, teacher, teacher_head = _unpacked(given, tensors)
        found = hidden.new_zeros(len(hidden), dtype=torch.float32)
        slope = torch.zeros_like(found)  # sum of p g
        normalisers = hidden.new_zeros(2, len(hidden), dtype=torch.float32)
        for part in parts_of(len(hidden), given.chunk):
            ours = head.logits(hidden, part, temperature)
            theirs = teacher_head.logits(teacher, part, temperature)
            own = torch.stack([log_sum(x, given.shard) for x in (ours, theirs)])
            sums = fused(_sums)(ours, theirs, own, *given.divergence, given.shard.real)
            reduce(sums, given.shard.group, dist.ReduceOp.SUM)
            found[part], slope[part] = sums
            normalisers[:, part] = own
        ctx.save_for_backward(*tensors, slope, normalisers)
        ctx.given = given
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given: _Given = ctx.given
        *tensors, slope, normalisers = ctx.saved_tensors
        hidden, head, temperature, teacher, teacher_head = _unpacked(given, tensors)
        total = HeadGradients(hidden, head, ctx.needs_input_grad[2:6])
        for part in parts_of(len(hidden), given.chunk):
            ours = head.logits(hidden, part, temperature)
            theirs = teacher_head.logits(teacher, part, temperature)
            grad = fused(_gradient)(
                ours,
                theirs,
                normalisers[:, part],
                slope[part],
                grads[0][part],
                *given.divergence,
                given.shard.real,
            )
            total.add(part, head.before_scale(grad, ours, temperature[part]))
        return None, *total.result(), *[None] * 6


def _unpacked(given: _Given, tensors: Any) -> tuple[Tensor, Head, Tensor, Tensor, Head]:
    """Returns the student's hidden states and head, the temperatures, and the teacher's hidden
    states and head.
    """
    hidden, *of_head, temperature, teacher = tensors[:7]
    head = given.head.with_tensors(of_head)
    return hidden, head, temperature, teacher, given.teacher_head.with_tensors(tensors[7:])


def _sums(
    ours: Tensor, theirs: Tensor, normalisers: Tensor, name: Name, beta: float, real: int
) -> Tensor:
    """Returns [2, c]: the divergence and the sum of p g over this rank's real columns.

    `ours`, `theirs`: logits of student and teacher [c, V]; `normalisers` [2, c]: their log-sums.
    """
    log_p = ours[:, :real] - normalisers[0, :, None]
    log_q = theirs[:, :real] - normalisers[1, :, None]
    p, q = log_p.exp(), log_q.exp()
    if name == "reverse_kl":
        value = (p * (log_p - log_q)).sum(-1)
        return torch.stack([value, value])
    if name == "forward_kl":
        return torch.stack([(q * (log_q - log_p)).sum(-1), -q.sum(-1)])
    log_m = log_average(log_p, log_q, beta)
    of_p = (1 - beta) * (p * (log_p - log_m)).sum(-1)
    return torch.stack([of_p + beta * (q * (log_q - log_m)).sum(-1), of_p])


def _gradient(
    ours: Tensor,
    theirs: Tensor,
    normalisers: Tensor,
    slope: Tensor,
    pull: Tensor,
    name: Name,
    beta: float,
    real: int,
) -> Tensor:
    """Returns the gradient of the loss with respect to the student's logits [c, V], 0 on padding
    columns.

    `slope` [c]: the sum of p g over the whole vocabulary. `pull` [c]: gradient of the loss with
    respect to the divergence.
    """
    log_p = ours[:, :real] - normalisers[0, :, None]
    log_q = theirs[:, :real] - normalisers[1, :, None]
    p, mean = log_p.exp(), slope[:, None]
    if name == "reverse_kl":
        found = p * (log_p - log_q - mean)
    elif name == "forward_kl":
        found = -log_q.exp() - p * mean
    else:
        found = p * ((1 - beta) * (log_p - log_average(log_p, log_q, beta)) - mean)
    grad = torch.zeros_like(ours)
    grad[:, :real] = found * pull[:, None]
    return grad


def log_average(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Returns log(beta q + (1 - beta) p)."""
    return torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
