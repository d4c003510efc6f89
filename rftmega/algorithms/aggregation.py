"""Loss aggregation as a per-token weight and an integer count.

Functions return (weight, count) instead of a mean, so this subpackage need not know about data,
context and pipeline parallelism: sums and counts add up across micro-batches and ranks, and the
division happens once.

A rollout of several rows counts as one response: its rows share its weight.
"""

from collections.abc import Callable

from torch import Tensor

from rftmega.core.types import EACH_ROW, Shares, TokenMetric

Aggregation = Callable[[Tensor, Shares], tuple[Tensor, Tensor]]


def token_mean(mask: Tensor, shares: Shares = EACH_ROW) -> tuple[Tensor, Tensor]:
    """Returns (weight [B, T], count) of a mean over all response tokens, whichever rollout they
    belong to (DAPO, arXiv:2503.14476, eq. 8); the count is the number of response tokens. `shares`
    has no effect.
    """
    return mask.float(), mask.sum()


def sequence_mean(mask: Tensor, shares: Shares = EACH_ROW) -> tuple[Tensor, Tensor]:
    """Returns (weight [B, T], count) of a mean over responses of their means over tokens, so that
    every response has the same weight, however long (GRPO, arXiv:2402.03300, eq. 3). `shares`: for
    rollouts of several rows, each row's share of its rollout's tokens.

    The count is the number of non-empty responses.
    """
    length = mask.sum(-1, keepdim=True)
    weight = mask / length.clamp(min=1)
    if shares.share is not None:
        weight = weight * shares.share[:, None]
    return weight, _responses(length[:, 0] > 0, shares)


def sequence_sum(constant: int) -> Aggregation:
    """Returns an aggregation that weights every response token by 1 / constant, so that a
    response's length does not matter (Dr. GRPO, arXiv:2503.20783, section 3.2; the constant is the
    maximum number of tokens of a response). Its count is the number of non-empty responses.
    """

    def aggregation(mask: Tensor, shares: Shares = EACH_ROW) -> tuple[Tensor, Tensor]:
        return mask / constant, _responses(mask.any(-1), shares)

    return aggregation


def sequence_total(mask: Tensor, shares: Shares = EACH_ROW) -> tuple[Tensor, Tensor]:
    """Returns (weight [B, T], count) of a mean over responses of their sums over tokens: a response
    is one action, whose log-probability is the sum of its tokens' log-probs (RLOO,
    arXiv:2402.14740, section 3). The count is the number of non-empty responses.
    """
    return mask.float(), _responses(mask.any(-1), shares)


def _responses(taught: Tensor, shares: Shares) -> Tensor:
    """Returns the number of responses that are trained on. `taught` [B] bool: whether a row has a
    token to train on. Of a rollout of several rows only the row that `shares.leads` marks is
    counted.
    """
    return (taught if shares.leads is None else taught & shares.leads).sum()


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_total": sequence_total,
}


def aggregation_of(name: str, *, longest: int) -> Aggregation:
    """Returns the aggregation that the option value `name` selects; `longest`: maximum tokens of a
    response.
    """
    return sequence_sum(longest) if name == "sequence_sum" else AGGREGATIONS[name]


def averaged(
    values: dict[str, Tensor],
    mask: Tensor,
    aggregation: Aggregation = token_mean,
    shares: Shares = EACH_ROW,
) -> dict[str, TokenMetric]:
    """Returns name -> TokenMetric for `values` (name -> [B, T]), without gradient. The metrics are
    averaged over the tokens of `mask` [B, T] whatever the loss's aggregation, or as another
    `aggregation` weights the tokens if given (`shares`: its argument for rollouts of several rows).
    """
    weight, count = aggregation(mask, shares)
    return {name: TokenMetric(value.detach(), weight, count) for name, value in values.items()}
