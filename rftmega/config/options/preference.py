"""Options of preference losses (algorithm.task=preference), a tagged union: only options of the
chosen loss can be set.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt

from rftmega.config.options.bounds import NotNegative, Positive

BelowHalf = Annotated[float, Ge(0), Lt(0.5)]


@dataclass(frozen=True)
class PreferenceLoss:
    """Base class of the options of preference losses."""

    needs_reference: ClassVar[bool] = False  # reads log-probs under the starting policy
    takes_labels: ClassVar[bool] = False  # reads single responses with a label, too


@dataclass(frozen=True)
class DPO(PreferenceLoss):
    """DPO: -log sigmoid of beta times the margin, by which the log-prob of the chosen response has
    risen over the reference more than that of the rejected one.
    """

    needs_reference: ClassVar[bool] = True

    type: Literal["dpo"] = "dpo"

    beta: Positive = 0.1
    """Factor of the log-ratio to the reference, whose product is the implicit reward; a larger one
    keeps the policy nearer to the reference.
    """

    label_smoothing: BelowHalf = 0.0
    """Share of pairs whose preference is assumed to be wrong (conservative DPO)."""

    nll_coef: NotNegative = 0.0
    """Weight of the mean -log p per token of the chosen response (RPO; loss_type sft in TRL); 0:
    none.
    """


@dataclass(frozen=True)
class PreferenceIPO(PreferenceLoss):
    """IPO: the squared distance of the margin of mean log-ratios per token to 1 / (2 beta), so that
    the margin does not grow without limit.
    """

    needs_reference: ClassVar[bool] = True

    type: Literal["ipo"] = "ipo"

    beta: Positive = 0.1
    """Regularization, tau in the paper: the margin's target is 1 / (2 beta)."""


@dataclass(frozen=True)
class SimPO(PreferenceLoss):
    """SimPO: -log sigmoid of beta times the margin of mean log-probs per token, minus gamma; without
    a reference.
    """

    type: Literal["simpo"] = "simpo"

    beta: Positive = 2.0
    """Factor of the mean log-prob per token, whose product is the implicit reward."""

    gamma: NotNegative = 1.0
    """Target of the reward margin."""


@dataclass(frozen=True)
class KTO(PreferenceLoss):
    """KTO: raises desirable and lowers undesirable responses, each compared with the mean KL of
    the policy to the reference; needs no pairs.
    """

    needs_reference: ClassVar[bool] = True
    takes_labels: ClassVar[bool] = True

    type: Literal["kto"] = "kto"

    beta: Positive = 0.1
    """Factor of the log-ratio to the reference, whose product is the implicit reward."""

    desirable_weight: NotNegative = 1.0
    """Weight of desirable responses."""

    undesirable_weight: NotNegative = 1.0
    """Weight of undesirable responses."""


@dataclass(frozen=True)
class ORPO(PreferenceLoss):
    """ORPO: supervised fine-tuning on the chosen response, plus coef times -log sigmoid of the log
    odds ratio of chosen to rejected response; without a reference.
    """

    type: Literal["orpo"] = "orpo"

    coef: NotNegative = 0.1
    """Weight of the odds ratio, lambda in the paper (beta in TRL)."""
