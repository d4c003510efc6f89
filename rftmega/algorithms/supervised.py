"""Losses of supervised fine-tuning and of reward models."""

import torch
from torch import Tensor
from torch.nn import functional

from rftmega.algorithms.aggregation import Aggregation, averaged, token_mean
from rftmega.core.ragged import Ragged
from rftmega.core.types import (
    Column,
    Experience,
    LossFn,
    Rows,
    TokenLoss,
    TokenMetric,
    TokenStats,
    TokenValues,
)


def cross_entropy_loss(aggregation: Aggregation = token_mean) -> LossFn:
    """Returns the SFT loss function: -log p of each response token, including the end-of-sequence
    token, with the token weights of `aggregation`; prompt tokens are not trained on.
    """

    def loss(stats: TokenStats, experience: Experience) -> TokenLoss:
        value = torch.where(experience.mask, -stats.logp, 0.0)
        shown = {"cross_entropy": value}
        if stats.entropy is not None:
            shown["entropy"] = torch.where(experience.mask, stats.entropy, 0.0)
        weight, count = aggregation(experience.mask, experience.shares)
        return TokenLoss(value, weight, count, averaged(shown, experience.mask))

    return loss


def pairwise_loss() -> LossFn:
    """Returns the loss function of a reward model: -log sigmoid(chosen - rejected) of the rewards
    of row 2i (chosen) and row 2i + 1 (rejected) (Bradley-Terry; arXiv:2203.02155, eq. 1).

    Needs rows from `Rows.with_end`, which have one more position for the score, in pairs
    (`update(..., group_size=2)`). A pair's loss is at the position of the chosen row's score; the
    count is the number of pairs. Accuracy counts a tie as wrong.
    """

    def loss(stats: TokenValues, experience: Experience) -> TokenLoss:
        reward = last_value(stats.value, experience.rows)
        assert len(reward) % 2 == 0, f"{len(reward)} rows are no pairs: a micro-batch split one"
        chosen, rejected = reward[0::2], reward[1::2]
        margin = chosen - rejected

        def everywhere(pair: Tensor) -> Tensor:
            return pair.repeat_interleave(2)[:, None].expand_as(stats.value)

        shown = {
            "accuracy": (margin > 0).float(),
            "margin": margin,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        weight = _at_end(stats.value, experience.rows)
        weight[1::2] = 0.0
        count = torch.tensor(len(margin), device=weight.device)
        metrics = {
            name: TokenMetric(everywhere(value.detach()), weight, count)
            for name, value in shown.items()
        }
        return TokenLoss(everywhere(functional.softplus(-margin)), weight, count, metrics)

    return loss


def last_value(values: Column, rows: Rows[Column]) -> Tensor:
    """Returns [B]: the value after each row's last token, which scores the whole row.

    `values`: a value model's output for `rows`, which must come from `Rows.with_end` (rows with one
    more position, for this value).
    """
    if isinstance(values, Ragged):
        return values.at(rows.lengths - 2)
    return values.gather(1, (rows.lengths - 2)[:, None])[:, 0]


def _at_end(values: Tensor, rows: Rows) -> Tensor:
    """Returns a mask [B, T]: 1 at the position that `last_value` reads, 0 elsewhere."""
    return (
        torch.arange(values.shape[1], device=values.device) == rows.lengths[:, None] - 2
    ).float()
