"""Computes log-probs and entropy directly from hidden states, with the logits of only one chunk of
tokens in memory at a time.
Legend: N tokens, H hidden size, V this rank's columns of the vocabulary, c tokens of a chunk.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.runtime import device

CHUNK = 1024  # tokens whose logits exist at once: memory is O(CHUNK x V), whatever N is


class VocabularyShard(NamedTuple):
    """VocabularyShard describes the range of token ids whose LM-head rows a tensor-parallel rank
    holds.
    """

    first: int  # id of the first column
    real: int  # columns of the vocabulary; those behind them are padding
    group: Any  # the tensor-parallel group; None for a group of one

    @classmethod
    def of_rank(cls, width: int, *, vocabulary: int, rank: int, group: Any) -> "VocabularyShard":
        """Returns the shard of a rank that holds `width` columns, padding included, in the
        tensor-parallel group `group`.
        `vocabulary` is the vocabulary's size without padding.
        """
        return cls(rank * width, max(0, min(width, vocabulary - rank * width)), group)


def linear_stats(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature: float | Tensor,
    shard: VocabularyShard,
    *,
    bias: Tensor | None = None,
    pair: tuple[Tensor, Tensor] | None = None,
    cap: float | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Returns (log-prob of each target, entropy), both [N] float32, of softmax((hidden @ weight.T +
    bias) / temperature); differentiable. With `cap`, the logits x before the division become cap *
    tanh(x / cap).

    `shard`: the range of the vocabulary in this rank's rows of `weight`. `bias` [V] is that of this
    rank's columns. `pair`: LoRA tensors (inner [N, r], up [V, r]); inner @ up.T is added to hidden
    @ weight.T. `temperature` is one for all tokens or [N]. `chunk`: number of tokens whose logits
    are computed at once. Padding columns are excluded from the softmax and get zero gradient. The
    gradients of `hidden` and inner are this rank's contributions: the caller sums them over the
    tensor-parallel ranks (Megatron's mappings do it).
    """
    if not isinstance(temperature, Tensor):
        temperature = hidden_NH.new_full((), temperature, dtype=torch.float32)
    inner, up = pair or (None, None)
    of_tokens = temperature.expand(len(hidden_NH))
    return _LinearStats.apply(
        hidden_NH, weight_VH, bias, inner, up, targets_N, of_tokens, shard, cap, chunk
    )


class _LinearStats(torch.autograd.Function):
    """_LinearStats implements `linear_stats`: with p the softmax and H its entropy, d logp / d
    logit = [target] - p, d H / d logit = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inner: Tensor | None,
        up: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        shard: VocabularyShard,
        cap: float | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logits = _Logits(hidden, weight, bias, inner, up, cap)
        largest, sums, last = _local_sums(logits, targets, temperature, shard, chunk)
        top = largest.clone()
        reduce(top, shard.group, dist.ReduceOp.MAX)
        shift = largest - top  # from this rank's largest logit to the largest of all
        scale = shift.exp()
        normaliser, weighted, target = sums
        # A rank with padding only has -inf as its largest: its sums are 0, and 0 * -inf is not.
        totals = torch.stack(
            [
                scale * normaliser,
                scale * (weighted + torch.where(normaliser > 0, shift, 0.0) * normaliser),
                target,
            ]
        )
        reduce(totals, shard.group, dist.ReduceOp.SUM)
        normaliser, weighted, target = totals
        log_normaliser = normaliser.log() + top
        logp = target - log_normaliser
        entropy = normaliser.log() - weighted / normaliser
        saved = targets, temperature, largest, log_normaliser, entropy, last
        ctx.save_for_backward(*logits[:5], *saved)
        ctx.shard, ctx.cap, ctx.chunk = shard, cap, chunk
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits = _Logits(*ctx.saved_tensors[:5])._replace(cap=ctx.cap)
        targets, temperature, largest, log_normaliser, entropy, last = ctx.saved_tensors[5:]
        shard: VocabularyShard = ctx.shard
        grad_logp, grad_entropy = grads
        grad_hidden = torch.empty_like(logits.hidden)
        grad_inner = None if logits.inner is None else torch.empty_like(logits.inner)
        # of weights that are not frozen
        grad_weight = zeros_for(logits.weight, ctx.needs_input_grad[1])
        grad_bias = zeros_for(logits.bias, ctx.needs_input_grad[2])
        grad_up = zeros_for(logits.up, ctx.needs_input_grad[4])
        pull = torch.zeros_like(log_normaliser) if grad_logp is None else grad_logp / temperature
        spread = None if grad_entropy is None else grad_entropy / temperature
        parts = parts_of(len(grad_hidden), ctx.chunk)
        for part in parts:
            given = logits.of(part)
            known = last if part is parts[-1] else None
            normaliser = log_normaliser[part] if known is None else (log_normaliser - largest)[part]
            column, held = columns_of(targets[part], shard)
            pulled = _Pulled(pull[part], None if spread is None else spread[part], entropy[part])
            grad, of_targets, slope = fused(_gradient)(
                given, known, temperature[part], normaliser, log_normaliser[part], column, pulled, shard.real
            )  # fmt: skip
            # a target's own term is added before rounding, because 1 - p may be small
            of_targets = ((of_targets + pull[part, None]) * slope).to(grad.dtype)
            grad.scatter_(-1, column, torch.where(held, of_targets, grad.gather(-1, column)))
            grad_hidden[part] = grad @ logits.weight
            if grad_inner is not None:
                grad_inner[part] = grad @ logits.up
            if grad_weight is not None:
                add_product(grad_weight, grad.T, given.hidden)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
            if grad_up is not None:
                add_product(grad_up, grad.T, given.inner)
            del grad  # before the next one is allocated
        of_weight = None if grad_weight is None else grad_weight.to(logits.weight.dtype)
        of_bias = None if grad_bias is None else grad_bias.to(logits.bias.dtype)
        of_up = None if grad_up is None else grad_up.to(logits.up.dtype)
        return grad_hidden, of_weight, of_bias, grad_inner, of_up, None, None, None, None, None


class _Logits(NamedTuple):
    """_Logits holds the tensors from which the logits [N, V] are computed."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Any = None  # [V], or None
    inner: Any = None  # [N, r], or None
    up: Any = None  # [V, r], or None
    cap: float | None = None  # see `linear_stats`

    def of(self, part: slice) -> "_Logits":
        """Returns the same tensors restricted to the tokens in `part`."""
        inner = None if self.inner is None else self.inner[part]
        return self._replace(hidden=self.hidden[part], inner=inner)

    def made(self, temperature: Tensor) -> Tensor:
        """Computes the logits in float32, divided by each token's temperature."""
        made = (self.hidden @ self.weight.T).float()
        if self.bias is not None:
            made += self.bias
        if self.inner is not None:
            made += self.inner @ self.up.T
        if self.cap is not None:
            made.div_(self.cap).tanh_().mul_(self.cap)
        return made.div_(temperature[:, None])


def zeros_for(weight: Tensor | None, learns: bool) -> Tensor | None:
    """Returns zeros in float32 to accumulate a weight's gradient in; None if the weight is absent
    or not trained.
    """
    return torch.zeros_like(weight, dtype=torch.float32) if weight is not None and learns else None


def _local_sums(
    logits: _Logits,
    targets: Tensor,
    temperature: Tensor,
    shard: VocabularyShard,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns, over this rank's columns x of the logits: the largest logit m [N]; [3, N]: sum of
    exp(x - m), sum of exp(x - m) (x - m), the target's logit or 0; and x - m of the last chunk [c,
    V], or None.

    `chunk`: number of tokens whose logits are computed at once. The last chunk's logits take no
    more memory than any chunk, and the backward pass need not recompute them.
    """
    last = None
    hidden = logits.hidden
    largest = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
    sums = hidden.new_zeros(3, len(hidden), dtype=torch.float32)
    parts = parts_of(len(hidden), chunk) if shard.real else []  # some ranks hold padding only
    for part in parts:
        column, held = columns_of(targets[part], shard)
        largest[part], sums[0, part], sums[1, part], target, last = fused(_row_sums)(
            logits.of(part), temperature[part], column, shard.real, part is parts[-1]
        )
        sums[2, part] = torch.where(held, target, 0.0)[:, 0]
    return largest, sums, last


class _Pulled(NamedTuple):
    """_Pulled holds, for each token of a chunk, the gradients of the loss with respect to the
    token's log-prob and entropy, and the entropy itself, all [c] float32.
    """

    pull: Tensor  # gradient of its log-prob, by temperature
    spread: Tensor | None  # gradient of its entropy, by temperature
    entropy: Tensor


def _row_sums(
    given: _Logits, temperature: Tensor, column: Tensor, real: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Returns for each token, with x its logits in the first `real` columns: their maximum m [c],
    sum of exp(x - m), sum of exp(x - m) (x - m), the logit at `column` [c, 1] and, with `keep`, the
    values x - m [c, V], otherwise None.
    """
    logits = given.made(temperature)
    target = logits.gather(-1, column)
    words = logits[:, :real]
    largest = words.max(-1).values
    logits.sub_(largest[:, None])
    p = words.exp()
    normaliser = p.sum(-1)
    return largest, normaliser, p.mul_(words).sum(-1), target, logits if keep else None


def _gradient(
    given: _Logits,
    known: Tensor | None,
    temperature: Tensor,
    normaliser: Tensor,
    log_normaliser: Tensor,
    column: Tensor,
    pulled: _Pulled,
    real: int,
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Returns the gradient of the loss with respect to the linear layer's output [c, V], without the
    term of the target's one-hot and 0 on padding columns (from column `real` on); the gradient with
    respect to the logit at `column`, unrounded [c, 1]; and the slope of the soft cap there.

    `given` computes the chunk's logits. `known`: the logits, if they need not be recomputed; they
    are modified. `normaliser` [c] is subtracted from the logits to get log-probs. `log_normaliser`
    [c]: log-prob + log_normaliser is the capped logit by temperature. `pulled`: gradients with
    respect to the log-probs and entropies.
    """
    if known is None:
        known = given.made(temperature)
    log_p = known.sub_(normaliser[:, None])
    slope: Tensor | None = None
    if given.cap is not None:  # of cap * tanh(x / cap): 1 - tanh(x / cap)^2
        capped = (log_p + log_normaliser[:, None]) * (temperature[:, None] / given.cap)
        slope = 1.0 - capped.square()
    of_targets = _pulled_by(log_p.gather(-1, column), pulled)
    grad = _pulled_by(log_p, pulled)
    if slope is not None:
        grad = grad.mul_(slope)
    grad[:, real:] = 0.0
    at_target = 1.0 if slope is None else slope.gather(-1, column)
    return grad.to(given.hidden.dtype), of_targets, at_target


def _pulled_by(log_p: Tensor, pulled: _Pulled) -> Tensor:
    """Returns the gradient -p (spread (log p + H) + pull), with `spread`, H and `pull` from
    `pulled`; modifies `log_p`.
    """
    grad = log_p.exp()
    if pulled.spread is None:
        return grad.mul_(-pulled.pull[:, None])
    spread = log_p.add_(pulled.entropy[:, None]).mul_(pulled.spread[:, None])
    return grad.mul_(spread.add_(pulled.pull[:, None]).neg_())


def add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Adds the matrix product of `one` and `other` to `total`, which is in float32."""
    if one.dtype == torch.float32:
        total.addmm_(one, other)
    else:
        total += one @ other


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, which computes one chunk of tokens, compiled to few kernels, or unchanged
    if the device has no compiler.
    """
    return _compiled(function, device.current())


@functools.cache
def _compiled(function: Callable[..., Any], where: device.Device) -> Callable[..., Any]:
    return where.compiled(function)


def columns_of(targets: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Returns the column of each target in this rank's shard (0 if another rank holds it), and
    whether this rank holds it, both [c, 1].
    """
    local = targets - shard.first
    held = (local >= 0) & (local < shard.real)
    return torch.where(held, local, 0)[:, None], held[:, None]


def parts_of(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, tokens, chunk)]


def reduce(x: Tensor, group: Any, op: Any) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
