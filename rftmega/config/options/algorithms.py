"""Options of the algorithm: tagged unions of components, so that only options of the chosen
components can be set.
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
from rftmega.config.options.preference import DPO, KTO, ORPO, PreferenceIPO, SimPO
from rftmega.config.options.teachers import Teacher


@dataclass(frozen=True)
class GroupNorm(Advantage):
    """GRPO: a completion's reward minus the mean reward of its prompt's completions, over the
    standard deviation of these rewards.
    """

    compares_group: ClassVar[bool] = True

    type: Literal["group_norm"] = "group_norm"

    scale_by_std: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO."""

    clip_filter_weight: NotNegative = 0.0
    """Multiply advantages by the number of groups over the number of groups whose rewards differ,
    at most by this (CPGD); 0: off.
    """


@dataclass(frozen=True)
class LeaveOneOut(Advantage):
    """RLOO: a completion's reward minus the mean reward of its prompt's other completions."""

    compares_group: ClassVar[bool] = True
    takes_kl: ClassVar[bool] = True

    type: Literal["leave_one_out"] = "leave_one_out"


@dataclass(frozen=True)
class Returns(Advantage):
    """REINFORCE: a token's advantage is the discounted sum of its reward and the rewards of all
    later tokens.
    """

    takes_kl: ClassVar[bool] = True

    type: Literal["reinforce"] = "reinforce"

    gamma: NotNegative = 1.0
    """Discount factor per token."""


@dataclass(frozen=True)
class GAE(Advantage):
    """PPO: generalised advantage estimation (GAE), with a trained critic."""

    needs_critic: ClassVar[bool] = True
    takes_kl: ClassVar[bool] = True

    type: Literal["gae"] = "gae"

    gamma: NotNegative = 1.0
    """Discount factor per token."""

    lam: Share = 1.0
    """GAE's lambda: 1 uses the observed rewards, 0 the critic's next value."""


@dataclass(frozen=True)
class TurnNorm(Advantage):
    """GRPO over turns: each turn's reward minus the mean over all turns of the prompt's
    completions, over the standard deviation of these rewards; a token's advantage is the sum over
    its turn and all later turns.
    """

    compares_group: ClassVar[bool] = True

    type: Literal["turn_norm"] = "turn_norm"

    scale_by_std: bool = True
    """Divide by the standard deviation of the rewards of all turns of the prompt's completions."""


@dataclass(frozen=True)
class MaxRL(Advantage):
    """MaxRL: a completion's reward minus the mean reward of its prompt's completions, over this
    mean; 0 if the mean is not positive. Prompts that are rarely solved count more than in GRPO.
    Made for rewards of 0 and 1.
    """

    compares_group: ClassVar[bool] = True

    type: Literal["maxrl"] = "maxrl"


@dataclass(frozen=True)
class PassAtK(Advantage):
    """Pass@k training: how much a completion raises the best reward among k completions of its
    prompt, over the standard deviation of this best reward.
    """

    compares_group: ClassVar[bool] = True

    type: Literal["pass_at_k"] = "pass_at_k"

    k: Count = 4
    """Completions among which the best counts; at most rollout.samples_per_prompt."""


@dataclass(frozen=True)
class GDPO(Advantage):
    """GDPO: GRPO's normalisation of each reward component by itself, then the weighted sum of these
    advantages, whitened over the rollout.
    """

    compares_group: ClassVar[bool] = True
    needs_parts: ClassVar[bool] = True

    type: Literal["gdpo"] = "gdpo"


@dataclass(frozen=True)
class Clip(PolicyLoss):
    """PPO: the smaller of ratio x advantage and clipped ratio x advantage."""

    type: Literal["clip"] = "clip"

    low: BelowOne = 0.2
    """Clip the ratio below 1 - low."""

    high: NotNegative = 0.2
    """Clip the ratio above 1 + high."""

    dual: NotNegative = 0.0
    """Bound the loss of a token with a negative advantage by dual (above 1) times the advantage's
    size (dual-clip PPO); 0: no bound.
    """


@dataclass(frozen=True)
class GSPO(PolicyLoss):
    """GSPO: like clip, with one ratio per completion, the geometric mean of its tokens' ratios."""

    type: Literal["gspo"] = "gspo"

    low: BelowOne = 0.2
    """Clip a completion's ratio below 1 - low."""

    high: NotNegative = 0.2
    """Clip a completion's ratio above 1 + high."""


@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """CISPO: REINFORCE's loss, -advantage x log-prob, weighted by the clipped ratio."""

    type: Literal["cispo"] = "cispo"

    low: NotNegative = 0.2
    """Clip the ratio, which is the weight, below 1 - low; 1 or more: no clip."""

    high: NotNegative = 0.2
    """Clip the ratio, which is the weight, above 1 + high."""


@dataclass(frozen=True)
class CPGD(PolicyLoss):
    """CPGD: the clipped log-ratio x advantage, and a drift term that keeps the policy near the one
    that sampled.
    """

    type: Literal["cpgd"] = "cpgd"

    low: BelowOne = 0.2
    """Clip the log-ratio below log(1 - low)."""

    high: NotNegative = 0.2
    """Clip the log-ratio above log(1 + high)."""

    drift_coef: NotNegative = 0.0
    """Weight of the KL to the policy that sampled; 0: no drift term."""

    drift_clip: Positive = 0.2
    """Maximum of ratio - 1 in the gradient of the drift term."""


@dataclass(frozen=True)
class ScoreFunction(PolicyLoss):
    """REINFORCE: -advantage x log-prob, without a ratio; correct for one optimizer step per
    rollout.
    """

    type: Literal["reinforce"] = "reinforce"


@dataclass(frozen=True)
class SAPO(PolicyLoss):
    """SAPO: a smooth gate instead of a clip, 4 / tau x sigmoid(tau x (ratio - 1)) x advantage."""

    type: Literal["sapo"] = "sapo"

    tau_positive: Positive = 1.0
    """Gate's temperature tau for positive advantages; a larger one decays faster."""

    tau_negative: Positive = 1.05
    """Gate's temperature tau for negative advantages."""


@dataclass(frozen=True)
class GMPO(PolicyLoss):
    """GMPO: one ratio per completion, the geometric mean of its tokens' ratios, each clipped in the
    direction of the advantage before the mean.
    """

    type: Literal["gmpo"] = "gmpo"

    low: Positive = 0.4
    """With a negative advantage, clip a token's log-ratio below -low."""

    high: Positive = 0.4
    """With a positive advantage, clip a token's log-ratio above high."""


@dataclass(frozen=True)
class DPPO(PolicyLoss):
    """DPPO: ratio x advantage, without the tokens whose probability has moved too far from the
    sampling policy's in the direction of the advantage (trust region in total variation).
    """

    needs_log_probs: ClassVar[bool] = True

    type: Literal["dppo"] = "dppo"

    low: Share = 0.2
    """With a negative advantage, drop tokens whose probability fell by more than this."""

    high: Share = 0.2
    """With a positive advantage, drop tokens whose probability rose by more than this."""

    drift_coef: NotNegative = 0.0
    """Weight of the squared log-ratio to the sampling policy; prime-rl has 0.001."""


@dataclass(frozen=True)
class IPO(PolicyLoss):
    """prime-rl's IPO: ratio x advantage, without the tokens whose probability has moved too far
    from the sampling policy's in any direction. It is not the preference loss of this name.
    """

    needs_log_probs: ClassVar[bool] = True

    type: Literal["ipo"] = "ipo"

    threshold: Share = 0.1
    """Drop tokens whose probability has changed by more than this."""

    drift_coef: NotNegative = 0.001
    """Weight of the squared log-ratio to the sampling policy."""


@dataclass(frozen=True)
class NoPolicyLoss(PolicyLoss):
    """No policy loss: the policy learns from its teachers alone, and rewards are only reported."""

    type: Literal["none"] = "none"


@dataclass(frozen=True)
class NoImportance(ImportanceSampling):
    """No correction: completions count as if the trainer's policy had sampled them."""

    type: Literal["none"] = "none"


@dataclass(frozen=True)
class TokenImportance(ImportanceSampling):
    """One weight per token: the trainer's probability over the engine's."""

    type: Literal["token"] = "token"

    cap: AtLeastOne = 2.0
    """Maximum weight; larger ones are reduced to it."""


@dataclass(frozen=True)
class SequenceImportance(ImportanceSampling):
    """One weight per completion: the product of its tokens' ratios of the trainer's to the engine's
    probability.
    """

    type: Literal["sequence"] = "sequence"

    cap: AtLeastOne = 2.0
    """Maximum weight; larger ones are reduced to it."""


@dataclass(frozen=True)
class MaskedImportance(ImportanceSampling):
    """Mask: weight 0 for tokens whose probabilities under trainer and engine differ by more than
    the factor cap, 1 for all others.
    """

    type: Literal["mask"] = "mask"

    cap: AtLeastOne = 2.0
    """Drop tokens whose ratio of the trainer's to the engine's probability lies outside 1 / cap to
    cap.
    """


@dataclass(frozen=True)
class IcePop(ImportanceSampling):
    """IcePop: one weight per token, the trainer's probability over the engine's; 0 for tokens where
    it lies outside low to high.
    """

    type: Literal["icepop"] = "icepop"

    low: PositiveShare = 0.5
    """Drop tokens with a smaller ratio."""

    high: AtLeastOne = 5.0
    """Drop tokens with a larger ratio."""


@dataclass
class KLConfig:
    placement: Literal["loss", "reward"] = "loss"
    """Where the KL to the starting policy enters: loss, or reward (advantage leave_one_out,
    reinforce or gae only).
    """

    estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """KL estimator: k1 (in the reward only: as a loss its gradient is zero on average), k2, k3, or
    unbiased (in the loss only: k3 times the ratio to the old policy, whose gradient is that of the
    KL; DeepSeek-V3.2).
    """

    coef: NotNegative = 0.0
    """KL coefficient (beta in TRL); 0: no KL and no reference model in memory."""

    target: NotNegative = 0.0
    """Target KL per token, reached by adapting coef (adaptive KL controller); 0: coef is constant.
    """

    horizon: Count = 10000
    """With a target: change coef by at most a fifth in this many completions."""


@dataclass
class ReplayConfig:
    max_age: NotNegativeInt = 0
    """Also train on completions of policies up to this many steps old, from a replay buffer (needs
    importance_sampling); 0: no replay.
    """

    max_rows: NotNegativeInt = 0
    """Maximum number of sequences in the buffer; the oldest groups are removed first. 0: no limit.
    """


@dataclass
class DynamicSamplingConfig:
    max_rounds: NotNegativeInt = 0
    """Dynamic sampling (DAPO): replace groups whose completions all score the same by further
    prompts, in at most this many rounds; 0: off.
    """

    metric: str = ""
    """Reward component that must differ within a group, such as exact_match; empty: the whole
    reward.
    """

    oversample: AtLeastOne = 1.0
    """Sample this times trainer.prompts_per_step prompts per round, and stop once enough groups
    have differing rewards. Prompts left over, unfinished or not needed, come first in the next
    step.
    """


@dataclass
class AlgorithmConfig:
    recipe: str = ""
    """Preset of options: a name in rftmega/config/recipes, or a YAML file's path; options that are
    set explicitly take precedence.
    """

    task: Literal["rl", "sft", "reward_model", "preference"] = "rl"
    """Task: rl (rewards of sampled completions), sft (supervised fine-tuning), reward_model (a
    reward model of preference data; docs/data.md) or preference (a policy of preference data;
    docs/preference.md).
    """

    preference: Annotated[DPO | PreferenceIPO | SimPO | KTO | ORPO, Discriminator("type")] = field(
        default_factory=DPO
    )
    """Loss of algorithm.task=preference."""

    reward_model_loss: Literal["pairwise", "cost"] = "pairwise"
    """Loss of algorithm.task=reward_model. pairwise: the chosen response scores higher; cost: the
    chosen response is the safer one and scores lower, and unsafe responses score above 0, safe ones
    below (the cost model of Safe RLHF).
    """

    advantage: Annotated[
        GroupNorm | LeaveOneOut | Returns | GAE | TurnNorm | MaxRL | PassAtK | GDPO,
        Discriminator("type"),
    ] = field(default_factory=GroupNorm)
    """Advantage estimator."""

    policy_loss: Annotated[
        Clip | GSPO | CISPO | CPGD | ScoreFunction | SAPO | GMPO | DPPO | IPO | NoPolicyLoss,
        Discriminator("type"),
    ] = field(default_factory=Clip)
    """Policy loss of a token, from its advantage and the ratio of its probabilities under the
    current and the old policy.
    """

    importance_sampling: Annotated[
        NoImportance | TokenImportance | SequenceImportance | MaskedImportance | IcePop,
        Discriminator("type"),
    ] = field(default_factory=NoImportance)
    """Importance-sampling correction of the log-prob mismatch between engine and trainer."""

    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_total"] = (
        "token_mean"
    )
    """Loss aggregation: token_mean (every token has the same weight), sequence_mean (every
    completion has the same weight), sequence_sum (tokens over the maximum response length, mean
    over completions) or sequence_total (sum over tokens, mean over completions: a completion is one
    action).
    """

    kl: KLConfig = field(default_factory=KLConfig)

    teachers: list[Teacher] = field(default_factory=list)
    """Distillation: models that teach the policy, in addition to rewards or (policy_loss.type=none)
    instead of them (docs/distillation.md).
    """

    replay: ReplayConfig = field(default_factory=ReplayConfig)

    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)

    whiten: bool = False
    """Whiten advantages to mean 0 and variance 1 over all response tokens of the rollout."""

    drop_truncated: bool = False
    """Leave truncated completions out of the loss (DAPO's overlong filtering)."""

    high_entropy_share: PositiveShare = 1.0
    """Train only on this share of each completion's tokens, those of highest entropy."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    ptx_coef: NotNegative = 0.0
    """Weight of the cross entropy on data.ptx; each step trains on trainer.prompts_per_step of its
    examples. 0: none.
    """

    on_policy_share: PositiveShare = 1.0
    """Share of the trained completions that the policy samples; the others are data.ptx's, on which
    only teachers train it (lambda of GKD). 1: all are sampled.
    """

    ema_beta: BelowOne = 0.0
    """Decay per optimizer step of an exponential moving average (EMA) of the policy, exported as
    output/policy_ema; 0: no average.
    """

    updates_per_epoch: Count = 1
    """Mini-batches per rollout, with one optimizer step each."""

    epochs_per_rollout: Count = 1
    """Training epochs per rollout (num_iterations in TRL); the first in the rollout's order,
    further ones shuffled.
    """

    @property
    def scores_reference_once(self) -> bool:
        """Returns whether the loss reads the log-probs of the given responses under the starting
        policy, which are computed once, before training.
        """
        return self.task == "preference" and self.preference.needs_reference

    @property
    def scores_mismatched(self) -> bool:
        """Returns whether each optimizer step scores mismatched responses first, for KTO's baseline."""
        return self.task == "preference" and self.preference.takes_labels

    @property
    def reads_reference(self) -> bool:
        """Returns whether log-probs under the starting policy are computed at all."""
        return self.kl.coef > 0 or self.scores_reference_once

    @property
    def steps_per_rollout(self) -> int:
        """Returns the number of optimizer steps per rollout."""
        return self.updates_per_epoch * self.epochs_per_rollout
