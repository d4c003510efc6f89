"""Options of the algorithm: tagged unions of parts, so that an option that no chosen part has
cannot be written.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator

from rftmega.config.options.bounds import (
    AtLeastOne,
    BelowOne,
    Count,
    NotNegative,
    NotNegativeInt,
    Positive,
    PositiveShare,
    Share,
)
from rftmega.config.options.parts import Advantage, ImportanceSampling, PolicyLoss


@dataclass(frozen=True)
class GroupNorm(Advantage):
    """GRPO: the reward minus the mean of the prompt's answers, over their deviation."""

    compares_group: ClassVar[bool] = True

    type: Literal["group_norm"] = "group_norm"

    scale_by_std: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO."""

    clip_filter_weight: NotNegative = 0.0
    """Multiply advantages by groups over groups whose rewards differ, at most by this (CPGD); 0:
    not.
    """


@dataclass(frozen=True)
class LeaveOneOut(Advantage):
    """RLOO: the reward minus the mean of the prompt's other answers."""

    compares_group: ClassVar[bool] = True
    takes_kl: ClassVar[bool] = True

    type: Literal["leave_one_out"] = "leave_one_out"


@dataclass(frozen=True)
class Returns(Advantage):
    """REINFORCE: the discounted sum of the rewards that follow a token."""

    takes_kl: ClassVar[bool] = True

    type: Literal["reinforce"] = "reinforce"

    gamma: NotNegative = 1.0
    """Discount a token."""


@dataclass(frozen=True)
class GAE(Advantage):
    """PPO: generalised advantage estimation; a critic learns beside the policy."""

    needs_critic: ClassVar[bool] = True
    takes_kl: ClassVar[bool] = True

    type: Literal["gae"] = "gae"

    gamma: NotNegative = 1.0
    """Discount a token."""

    lam: Share = 1.0
    """Lambda: 1 trusts the rewards that came, 0 the critic's next value."""


@dataclass(frozen=True)
class TurnNorm(Advantage):
    """GRPO over turns: each turn's reward minus the mean of all turns' of the prompt's answers, over
    their deviation; a token has the sum of its turn's and of those that follow.
    """

    compares_group: ClassVar[bool] = True

    type: Literal["turn_norm"] = "turn_norm"

    scale_by_std: bool = True
    """Divide by the standard deviation of the group's turns."""


@dataclass(frozen=True)
class Clip(PolicyLoss):
    """PPO: the smaller of ratio and clipped ratio, times the advantage."""

    type: Literal["clip"] = "clip"

    low: BelowOne = 0.2
    """Clip the ratio below 1 - low."""

    high: NotNegative = 0.2
    """Clip the ratio above 1 + high."""

    dual: NotNegative = 0.0
    """Bound the loss of a token with a negative advantage by dual (above 1) times its size; 0: no
    bound.
    """


@dataclass(frozen=True)
class GSPO(PolicyLoss):
    """GSPO: as clip, of one ratio an answer."""

    type: Literal["gspo"] = "gspo"

    low: BelowOne = 0.2
    """Clip an answer's ratio below 1 - low."""

    high: NotNegative = 0.2
    """Clip an answer's ratio above 1 + high."""


@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """CISPO: the score function, weighted with the clipped ratio."""

    type: Literal["cispo"] = "cispo"

    low: NotNegative = 0.2
    """Clip the weight below 1 - low; 1 and more: no clip."""

    high: NotNegative = 0.2
    """Clip the weight above 1 + high."""


@dataclass(frozen=True)
class CPGD(PolicyLoss):
    """CPGD: the clipped logarithm of the ratio, and a drift term."""

    type: Literal["cpgd"] = "cpgd"

    low: BelowOne = 0.2
    """Clip the log-ratio below log(1 - low)."""

    high: NotNegative = 0.2
    """Clip the log-ratio above log(1 + high)."""

    drift_coef: NotNegative = 0.0
    """Weight of the KL from the policy that sampled; 0: no drift term."""

    drift_clip: Positive = 0.2
    """Largest ratio minus 1 in the gradient of the drift term."""


@dataclass(frozen=True)
class ScoreFunction(PolicyLoss):
    """REINFORCE: the plain score function; right for one optimizer step a rollout."""

    type: Literal["reinforce"] = "reinforce"


@dataclass(frozen=True)
class NoImportance(ImportanceSampling):
    """No correction: the engine's probabilities are taken for the trainer's."""

    type: Literal["none"] = "none"


@dataclass(frozen=True)
class TokenImportance(ImportanceSampling):
    """A weight a token: the trainer's over the engine's probability."""

    type: Literal["token"] = "token"

    cap: AtLeastOne = 2.0
    """Largest weight."""


@dataclass(frozen=True)
class SequenceImportance(ImportanceSampling):
    """A weight an answer: the product of its tokens' weights."""

    type: Literal["sequence"] = "sequence"

    cap: AtLeastOne = 2.0
    """Largest weight."""


@dataclass(frozen=True)
class MaskedImportance(ImportanceSampling):
    """Drops the tokens whose probabilities differ most."""

    type: Literal["mask"] = "mask"

    cap: AtLeastOne = 2.0
    """Drop tokens whose weight lies outside 1 / cap to cap."""


@dataclass
class KLConfig:
    placement: Literal["loss", "reward"] = "loss"
    """Place of the KL to the starting policy: loss, or reward (advantage leave_one_out, reinforce
    or gae only).
    """

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 (in the reward only: as a loss it has no direction), k2 or k3."""

    coef: NotNegative = 0.0
    """Weight of the KL; 0 keeps no reference weights."""

    target: NotNegative = 0.0
    """KL a token at which coef is kept, by raising and lowering it; 0: coef stays."""

    horizon: Count = 10000
    """With a target: change coef by at most a fifth in so many answers."""


@dataclass
class ReplayConfig:
    max_age: NotNegativeInt = 0
    """Learn also from answers of policies up to so many steps old, from a buffer (with
    importance_sampling); 0: of none.
    """

    max_rows: NotNegativeInt = 0
    """Rows that the buffer keeps; the oldest groups go first. 0: no limit."""


@dataclass
class DynamicSamplingConfig:
    max_rounds: NotNegativeInt = 0
    """Replace groups whose answers all score alike by further prompts, in at most so many rounds;
    0: they stay.
    """

    metric: str = ""
    """Part of the reward that must differ within a group, such as exact_match; empty: the whole
    reward.
    """

    oversample: AtLeastOne = 1.0
    """Sample oversample x prompts_per_step prompts a round; stop once enough groups differ.

    Unfinished prompts come first.
    """


@dataclass
class AlgorithmConfig:
    recipe: str = ""
    """Bundle of options: a name of rftmega/config/recipes, or a YAML file's path; what is set
    besides it comes first.
    """

    task: Literal["rl", "sft", "reward_model"] = "rl"
    """rl (rewards of sampled answers), sft (given answers) or reward_model (given preferences);
    docs/data.md.
    """

    advantage: Annotated[
        GroupNorm | LeaveOneOut | Returns | GAE | TurnNorm, Discriminator("type")
    ] = field(default_factory=GroupNorm)
    """Estimator of advantages from rewards."""

    policy_loss: Annotated[Clip | GSPO | CISPO | CPGD | ScoreFunction, Discriminator("type")] = (
        field(default_factory=Clip)
    )
    """Loss of a token, from its ratio and advantage."""

    importance_sampling: Annotated[
        NoImportance | TokenImportance | SequenceImportance | MaskedImportance,
        Discriminator("type"),
    ] = field(default_factory=NoImportance)
    """Correction of the engine's probabilities against the trainer's."""

    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_total"] = (
        "token_mean"
    )
    """token_mean (every token weighs the same), sequence_mean (every answer does), sequence_sum
    (tokens over the longest answer allowed, answers averaged) or sequence_total (tokens summed,
    answers averaged: an answer is one action).
    """

    kl: KLConfig = field(default_factory=KLConfig)

    replay: ReplayConfig = field(default_factory=ReplayConfig)

    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)

    whiten: bool = False
    """Give advantages mean 0 and variance 1 over all response tokens of the rollout."""

    drop_truncated: bool = False
    """Leave answers that were cut off out of the loss (DAPO's overlong filtering)."""

    high_entropy_share: PositiveShare = 1.0
    """Learn from this share of each answer's tokens only, those of highest entropy."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    ptx_coef: NotNegative = 0.0
    """Weight of the cross entropy of data.ptx, of which each step learns as many examples as it has
    prompts; 0: none.
    """

    ema_beta: BelowOne = 0.0
    """Decay, a step of the optimizer, of the moving average of the policy, exported as
    output/policy_ema; 0 keeps none.
    """

    updates_per_epoch: Count = 1
    """Mini-batches that a rollout is cut into, one optimizer step each."""

    epochs_per_rollout: Count = 1
    """Times that a rollout is learnt from; the first in its order, further ones shuffled."""

    @property
    def steps_per_rollout(self) -> int:
        """Counts the optimizer steps of one rollout."""
        return self.updates_per_epoch * self.epochs_per_rollout
