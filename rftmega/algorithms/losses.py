"""Policy loss per token, without reduction: a `TokenLoss` holds value, weight and count."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from rftmega.algorithms.aggregation import Aggregation, averaged, sequence_mean, token_mean
from rftmega.algorithms.kl import ESTIMATORS, UNBIASED, KLController
from rftmega.algorithms.mismatch import importance
from rftmega.algorithms.surrogates import Surrogate, clip_binds, ratio_of
from rftmega.config.options.algorithms import GSPO, Clip, NoImportance
from rftmega.config.options.parts import IMPLEMENTATIONS, ImportanceSampling, PolicyLoss
from rftmega.core.types import Experience, LossFn, TokenLoss, TokenStats


def policy_loss(
    *,
    options: PolicyLoss = Clip(),  # noqa: B008  immutable
    correction: ImportanceSampling = NoImportance(),  # noqa: B008
    high_entropy_share: float = 1.0,
    kl_coef: float | KLController = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    teachers: Mapping[str, float] | None = None,
    sampled_teachers: Collection[str] = (),
    aggregation: Aggregation = token_mean,
) -> LossFn:
    """Returns the policy's loss function: surrogate + kl_coef x KL to the reference - entropy_coef
    x entropy + the divergence from each teacher x its weight, per token, with the token weights of
    `aggregation`.

    `options` selects the surrogate, which is multiplied by the importance weight of `correction`;
    `kl_estimator` is a key of ESTIMATORS: k1, k2, k3 or unbiased. `high_entropy_share` below 1 trains only on
    that share of each completion's tokens, those with the highest entropy (after arXiv:2506.01939,
    which takes the share over the batch). `teachers`: name -> weight, in the order of
    `Experience.teachers`; divergences are 0 for tokens that a teacher does not teach. Those of
    `sampled_teachers` are estimated from the sampled token, an expectation over the policy's
    tokens, and are multiplied by the importance weight as well.

    Metrics are means over all response tokens, except `policy_loss`, which is aggregated like the
    loss, and `clip_fraction`, the share of the trained tokens (for gspo: of the completions) whose
    gradient the clip cuts off.
    """
    kl = ESTIMATORS[kl_estimator]
    kl_weight = kl_coef if isinstance(kl_coef, KLController) else KLController(kl_coef)
    surrogate: Surrogate = IMPLEMENTATIONS[type(options)]

    def loss(stats: TokenStats, experience: Experience) -> TokenLoss:
        mask, old_logp = experience.mask, experience.old_logp
        assert old_logp is not None, "whoever runs the forward pass fills them in"
        # Masked before exp: a padding column may hold anything, and inf * 0 is NaN.
        log_ratio = torch.where(mask, stats.logp - old_logp, 0.0)
        advantage = torch.where(mask, experience.advantage, 0.0)
        weighed = importance(old_logp, experience.behaviour_logp, mask, correction)
        more = log_probs(stats.logp, experience, options)
        value = weighed * surrogate(log_ratio, advantage, mask, options, **more)
        surrogate_loss = value
        shown = {"ratio": ratio_of(log_ratio.detach()), "ppo_kl": -log_ratio, "importance": weighed}
        if experience.reference_logp is not None:
            delta = torch.where(mask, stats.logp - experience.reference_logp, 0.0)
            shown["kl"] = kl(delta.detach())
            if kl_weight.value:
                ratio = ratio_of(log_ratio) if kl_estimator == UNBIASED else 1.0
                value = value + kl_weight.value * ratio * kl(delta)
        kept = mask
        if stats.entropy is not None:
            entropy = torch.where(mask, stats.entropy, 0.0)
            shown["entropy"] = entropy
            if entropy_coef:
                value = value - entropy_coef * entropy
            if high_entropy_share < 1:
                kept = mask & highest(entropy.detach(), mask, high_entropy_share)
        for number, (name, teacher_weight) in enumerate((teachers or {}).items()):
            assert stats.divergence is not None, "the forward pass computes it"
            divergence = torch.where(mask, stats.divergence[..., number], 0.0)
            shown[f"{name}_divergence"] = divergence
            if name in sampled_teachers:
                divergence = weighed * divergence
            value = value + teacher_weight * divergence
        shares = experience.shares
        metrics = averaged({"policy_loss": surrogate_loss}, kept, aggregation, shares)
        metrics |= averaged(shown, mask)
        binds = clip_binds(options, log_ratio.detach(), advantage, mask, **more)
        if binds is not None:
            of_completions = sequence_mean if isinstance(options, GSPO) else token_mean
            metrics |= averaged({"clip_fraction": binds.float()}, kept, of_completions, shares)
        weight, count = aggregation(kept, shares)
        return TokenLoss(value, weight, count, metrics)

    return loss


def log_probs(logp: Tensor, experience: Experience, options: PolicyLoss) -> dict[str, Tensor]:
    """Returns the further arguments of a surrogate that needs log-probs: the current ones and the
    engine's, [B, T], 0 outside the mask; {} for all others.
    """
    if not options.needs_log_probs:
        return {}
    named = {"logp": logp, "sampling_logp": experience.behaviour_logp}
    return {name: torch.where(experience.mask, each, 0.0) for name, each in named.items()}


def highest(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """Returns a mask [B, T] that is True for the tokens with the highest `entropy` [B, T]: a
    `share` of each completion's tokens (rounded down, at least one).

    It is never True outside `mask` [B, T], the tokens to train on; of tokens with equal entropy the
    first ones are chosen.
    """
    kept = (mask.sum(-1, keepdim=True) * share).floor().clamp(min=1)
    order = entropy.masked_fill(~mask, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1]).expand_as(order).to(order)
    )
    return (rank < kept) & mask
