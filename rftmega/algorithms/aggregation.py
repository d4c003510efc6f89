"""Every way to average a ragged batch is a per-token weight and an integer count.

Returning (weight, count) instead of a mean is what keeps data, context and pipeline parallelism out
of this folder: sums and counts add up across micro-batches and ranks, and the division happens
once.

A rollout of several rows counts as one response: its rows share its weight.
"""

from collections.abc import Callable

from torch import Tensor

from rftmega.core.types import EACH_ROW, Shares, TokenMetric

Aggregation = Callable[[Tensor, Shares], tuple[Tensor, Tensor]]


def token_mean(mask: Tensor, shares: Shares = EACH_ROW) -> tuple[Tensor, Tensor]:
    """Weighs every response token the same (DAPO, arXiv:2503.14476, eq. 8)."""
    return mask.float(), mask.sum()


def sequence_mean(mask: Tensor, shares: Shares = EACH_ROW) -> tuple[Tensor, Tensor]:
    """Weighs every response the same, however long (GRPO, arXiv:2402.03300, eq. 3).

    Count: non-empty responses.
    """
    length = mask.sum(-1, keepdim=True)
    weight = mask / length.clamp(min=1)
    if shares.share is not None:
        weight = weight * shares.share[:, None]
    return weight, _responses(length[:, 0] > 0, shares)


def sequence_sum(constant: int) -> Aggregation:
    """Weighs every response token by 1 / constant in its response's sum, so that no response's
    length matters (Dr. GRPO, arXiv:2503.20783, section 3.2; the constant is the most tokens that a
    response may have). Count: non-empty responses.
    """

    def aggregation(mask: Tensor, shares: Shares = EACH_ROW) -> tuple[Tensor, Tensor]:
        return mask / constant, _responses(mask.any(-1), shares)

    return aggregation


def sequence_total(mask: Tensor, shares: Shares = EACH_ROW) -> tuple[Tensor, Tensor]:
    """Sums every response's tokens, and averages responses: a response is one action, whose
    log-probability is the sum of its tokens' (RLOO, arXiv:2402.14740, section 3). Count: non-empty
    responses.
    """
    return mask.float(), _responses(mask.any(-1), shares)


def _responses(taught: Tensor, shares: Shares) -> Tensor:
    """Counts responses of which something is learnt: taught [B] bool says whether of a row."""
    return (taught if shares.leads is None else taught & shares.leads).sum()


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_total": sequence_total,
}


def aggregation_of(name: str, *, longest: int) -> Aggregation:
    """Returns the aggregation that an option names; `longest`: tokens that a response may have."""
    return sequence_sum(longest) if name == "sequence_sum" else AGGREGATIONS[name]


def averaged(
    values: dict[str, Tensor],
    mask: Tensor,
    aggregation: Aggregation = token_mean,
    shares: Shares = EACH_ROW,
) -> dict[str, TokenMetric]:
    """Returns the metrics of `values` ([B, T] each), averaged over `mask` [B, T]: by tokens,
    however the loss is averaged, or as told.
    """
    weight, count = aggregation(mask, shares)
    return {name: TokenMetric(value.detach(), weight, count) for name, value in values.items()}
