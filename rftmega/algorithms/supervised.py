"""Losses of supervised fine-tuning and of reward models."""

from collections.abc import Mapping

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
        chosen, rejected = _scores_of_pairs(stats, experience)
        margin = chosen - rejected
        shown = {
            "accuracy": (margin > 0).float(),
            "margin": margin,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        return _of_pairs(functional.softplus(-margin), shown, stats, experience)

    return loss


def cost_loss() -> LossFn:
    """Returns the loss function of a cost model, whose scores are higher for more harmful responses,
    and above 0 for unsafe ones (Safe RLHF; arXiv:2310.12773, section 3.2).

    The rows are pairs as for `pairwise_loss`, where the chosen response is the safer one, and
    `Experience.unsafe` says which responses are unsafe. A pair's loss is -log sigmoid(rejected -
    chosen) - log sigmoid(s_chosen chosen) - log sigmoid(s_rejected rejected), where s is 1 for an
    unsafe and -1 for a safe response. `safety_accuracy` is the share of responses whose score has
    the right sign.
    """

    def loss(stats: TokenValues, experience: Experience) -> TokenLoss:
        chosen, rejected = _scores_of_pairs(stats, experience)
        assert experience.unsafe is not None, "the loss of a cost model needs safety labels"
        sign = torch.where(experience.unsafe, 1.0, -1.0).to(chosen)
        margin = rejected - chosen
        signed = [sign[0::2] * chosen, sign[1::2] * rejected]
        value = sum((functional.softplus(-each) for each in signed), functional.softplus(-margin))
        shown = {
            "accuracy": (margin > 0).float(),
            "safety_accuracy": torch.stack([(each > 0).float() for each in signed]).mean(0),
            "margin": margin,
            "chosen_cost": chosen,
            "rejected_cost": rejected,
        }
        return _of_pairs(value, shown, stats, experience)

    return loss


def _scores_of_pairs(stats: TokenValues, experience: Experience) -> tuple[Tensor, Tensor]:
    """Returns the scores of the chosen and of the rejected responses, one of each per pair."""
    score = last_value(stats.value, experience.rows)
    assert len(score) % 2 == 0, f"{len(score)} rows are no pairs: a micro-batch split one"
    return score[0::2], score[1::2]


def _of_pairs(
    value: Tensor, shown: Mapping[str, Tensor], stats: TokenValues, experience: Experience
) -> TokenLoss:
    """Returns the loss `value` and the metrics `shown`, one number per pair, at the position of the
    chosen row's score.
    """
    weight = _at_end(stats.value, experience.rows)
    weight[1::2] = 0.0
    count = torch.tensor(len(value), device=weight.device)

    def everywhere(pair: Tensor) -> Tensor:
        return pair.repeat_interleave(2)[:, None].expand_as(stats.value)

    metrics = {
        name: TokenMetric(everywhere(number.detach()), weight, count)
        for name, number in shown.items()
    }
    return TokenLoss(everywhere(value), weight, count, metrics)


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
