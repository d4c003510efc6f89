"""Preference losses: DPO, IPO, SimPO, KTO and ORPO, on the log-probs of whole responses.

Rows come in pairs (`update(..., group_size=2)`): row 2i is the chosen, row 2i + 1 the rejected
response. KTO also takes rows without a pair. Log-probs of responses are summed in float64, so that
differences of two long responses keep the precision of their tokens.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from rftmega.config.options.preference import (
    DPO,
    KTO,
    ORPO,
    PreferenceIPO,
    PreferenceLoss,
    SimPO,
)
from rftmega.core.types import Experience, LossFn, TokenLoss, TokenMetric, TokenStats

Pairs = tuple[Tensor, Tensor]  # numbers of the chosen and of the rejected responses, [P] each
LARGEST = -1e-7  # mean log-prob per token; the odds of a probability of 1 are infinite


def preference_loss(options: PreferenceLoss, *, paired: bool = True) -> LossFn:
    """Returns the loss function that `options` selects; `paired`: the rows are pairs, otherwise
    single responses with labels, which only KTO takes.

    The count is the number of pairs; for KTO it is the number of responses.
    """
    if isinstance(options, KTO):
        return _kto(options, paired=paired)
    assert paired, f"{options} needs pairs"
    of_pairs = LOSSES[type(options)]

    def loss(stats: TokenStats, experience: Experience) -> TokenLoss:
        responses = Responses(stats, experience)
        value, reward, further = of_pairs(options, responses)
        shown = _rewards_of_pairs(reward) | _named("logp", responses.logp) | further
        weight = _at_end(responses.mask, experience)
        weight[1::2] = 0.0
        return _reduced(_twice(value), _doubled(shown), weight)

    return loss


class Responses:
    """Responses holds the log-probs and lengths of the responses of a micro-batch, [B] each."""

    def __init__(self, stats: TokenStats, experience: Experience):
        self.mask = experience.mask
        self.sums = torch.where(self.mask, stats.logp, 0.0).double().sum(-1)
        self.lengths = self.mask.sum(-1).clamp(min=1)
        self.reference = experience.reference_sum

    @property
    def log_ratios(self) -> Tensor:
        """Returns [B]: log-prob under the policy minus that under the reference."""
        assert self.reference is not None, "this loss reads the log-probs of the reference"
        return self.sums - self.reference

    @property
    def logp(self) -> Pairs:
        return _pairs(self.sums)

    @property
    def mean_logp(self) -> Pairs:
        """Returns the mean log-probs per token of the pairs."""
        return _pairs(self.sums / self.lengths)


OfPairs = Callable[[PreferenceLoss, Responses], tuple[Tensor, Pairs, dict[str, Tensor]]]


def _dpo(options: PreferenceLoss, responses: Responses) -> tuple[Tensor, Pairs, dict[str, Tensor]]:
    """Returns (loss, implicit rewards, further metrics) of each pair: DPO (arXiv:2305.18290, eq.
    7), with label smoothing e: -(1 - e) log sigmoid(margin) - e log sigmoid(-margin).

    With nll_coef, adds the chosen response's -log p per token (RPO, arXiv:2404.19733).
    """
    assert isinstance(options, DPO)
    chosen, rejected = reward = _pairs(options.beta * responses.log_ratios)
    margin, wrong = chosen - rejected, options.label_smoothing
    value = (1 - wrong) * functional.softplus(-margin) + wrong * functional.softplus(margin)
    if not options.nll_coef:
        return value, reward, {}
    nll = -responses.mean_logp[0]
    return value + options.nll_coef * nll, reward, {"cross_entropy": nll}


def _ipo(options: PreferenceLoss, responses: Responses) -> tuple[Tensor, Pairs, dict[str, Tensor]]:
    """Returns (loss, implicit rewards, further metrics) of each pair: IPO (arXiv:2310.12036, eq.
    17), on log-ratios per token, as in TRL; rewards are those of DPO.
    """
    assert isinstance(options, PreferenceIPO)
    chosen, rejected = _pairs(responses.log_ratios / responses.lengths)
    value = (chosen - rejected - 1 / (2 * options.beta)) ** 2
    return value, _pairs(options.beta * responses.log_ratios), {}


def _simpo(
    options: PreferenceLoss, responses: Responses
) -> tuple[Tensor, Pairs, dict[str, Tensor]]:
    """Returns (loss, implicit rewards, further metrics) of each pair: SimPO (arXiv:2405.14734, eq.
    6).
    """
    assert isinstance(options, SimPO)
    chosen, rejected = (options.beta * mean for mean in responses.mean_logp)
    return functional.softplus(options.gamma - (chosen - rejected)), (chosen, rejected), {}


def _orpo(options: PreferenceLoss, responses: Responses) -> tuple[Tensor, Pairs, dict[str, Tensor]]:
    """Returns (loss, implicit rewards, further metrics) of each pair: ORPO (arXiv:2403.07691, eq. 6
    and 7), where the probability of a response is the geometric mean over its tokens. The rewards
    are coef times the mean log-prob per token, as in TRL.
    """
    assert isinstance(options, ORPO)
    chosen, rejected = responses.mean_logp
    log_odds = _log_odds(chosen) - _log_odds(rejected)
    value = -chosen + options.coef * functional.softplus(-log_odds)
    further = {"cross_entropy": -chosen, "log_odds_ratio": log_odds}
    return value, (options.coef * chosen, options.coef * rejected), further


LOSSES: Mapping[type[PreferenceLoss], OfPairs] = {
    DPO: _dpo,
    PreferenceIPO: _ipo,
    SimPO: _simpo,
    ORPO: _orpo,
}


def _log_odds(logp: Tensor) -> Tensor:
    """Returns log(p / (1 - p)) of probabilities p, given as log p."""
    logp = logp.clamp(max=LARGEST)
    rest = torch.where(
        logp > -math.log(2), torch.log(-torch.expm1(logp)), torch.log1p(-torch.exp(logp))
    )
    return logp - rest


def _kto(options: KTO, *, paired: bool) -> LossFn:
    """Returns the loss function of KTO (arXiv:2402.01306, section 4): weight x (1 - sigmoid(beta
    (log-ratio - z0))) of a desirable response, weight x (1 - sigmoid(beta (z0 - log-ratio))) of an
    undesirable one; z0 is `Experience.kl_baseline`.

    The accuracy of pairs is that of the other losses. Of single responses it is the share on the
    right side of z0.
    """

    def loss(stats: TokenStats, experience: Experience) -> TokenLoss:
        responses = Responses(stats, experience)
        desirable, baseline = experience.desirable, experience.kl_baseline
        assert desirable is not None and baseline is not None, "KTO needs labels and a baseline"
        reward = options.beta * responses.log_ratios
        sign = torch.where(desirable, 1.0, -1.0).to(reward)
        above = sign * (reward - options.beta * baseline)
        scale = torch.where(desirable, options.desirable_weight, options.undesirable_weight)
        value = scale * torch.sigmoid(-above)
        ends = _at_end(responses.mask, experience)
        shown: dict[str, Tensor] = {"kl": baseline}
        if paired:
            pairs = _rewards_of_pairs(_pairs(reward)) | _named("logp", responses.logp)
            return _reduced(value, shown | _doubled(pairs), ends)
        found = _reduced(value, shown | {"accuracy": (above > 0).double()}, ends)
        for name, of in (("chosen", desirable), ("rejected", ~desirable)):
            own = {f"{name}_reward": reward, f"{name}_logp": responses.sums}
            found.metrics.update(_metrics(own, ends * of[:, None]))
        return found

    return loss


def _pairs(of_rows: Tensor) -> Pairs:
    assert len(of_rows) % 2 == 0, f"{len(of_rows)} rows are no pairs: a micro-batch split one"
    return of_rows[0::2], of_rows[1::2]


def _twice(of_pairs: Tensor) -> Tensor:
    """Returns [2 P]: each pair's number for both of its rows."""
    return of_pairs.repeat_interleave(2)


def _doubled(of_pairs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _twice(number) for name, number in of_pairs.items()}


def _named(name: str, pairs: Pairs) -> dict[str, Tensor]:
    return {f"chosen_{name}": pairs[0], f"rejected_{name}": pairs[1]}


def _rewards_of_pairs(reward: Pairs) -> dict[str, Tensor]:
    """Returns the metrics of implicit rewards. The accuracy counts a tie as wrong."""
    margin = reward[0] - reward[1]
    return {"accuracy": (margin > 0).double(), "margin": margin} | _named("reward", reward)


def _at_end(mask: Tensor, experience: Experience) -> Tensor:
    """Returns a weight [B, T]: 1 at the last token of each row, where the number of a whole response
    is placed; 0 elsewhere.
    """
    place = torch.arange(mask.shape[1], device=mask.device)
    return (place == experience.lengths[:, None] - 2).float()


def _reduced(value: Tensor, shown: Mapping[str, Tensor], weight: Tensor) -> TokenLoss:
    """Returns the loss `value` and the metrics `shown`, one number per row, as means over the rows
    of `weight` ([B, T], 1 at one place of such a row).
    """
    metrics = _metrics(shown, weight)
    spread = value.float()[:, None].expand_as(weight)
    return TokenLoss(spread, weight, _rows_of(weight), metrics)


def _metrics(shown: Mapping[str, Tensor], weight: Tensor) -> dict[str, TokenMetric]:
    count = _rows_of(weight)
    return {
        name: TokenMetric(number.detach().float()[:, None].expand_as(weight), weight, count)
        for name, number in shown.items()
    }


def _rows_of(weight: Tensor) -> Tensor:
    return weight.sum().to(torch.int64)
