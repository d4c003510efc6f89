"""ExperienceMaker: samples in, one Experience out. Asks the models for log-probs and values and turns rewards into advantages."""

from typing import Any

from rftmega.algorithms import kl
from rftmega.algorithms.advantages import ESTIMATORS, Scored, whitened
from rftmega.algorithms.kl import KLController
from rftmega.algorithms.shaping import Shaping
from rftmega.interfaces import Scorer, ValueScorer
from rftmega.types import Experience, Samples


class ExperienceMaker:
    """Advantages by one of ESTIMATORS, old log-probs of the trainer and, on request, those of the reference."""

    def __init__(
        self,
        policy: Scorer,
        *,
        use_reference: bool,
        critic: ValueScorer | None = None,
        advantage: str = "group",
        scale_by_std: bool = True,
        clip_filter_weight: float = 0.0,
        whiten: bool = False,
        gamma: float = 1.0,
        lam: float = 1.0,
        kl_in_reward: KLController | None = None,
        kl_estimator: str = "k1",
        shape: Shaping | None = None,
        drop_truncated: bool = False,
    ):
        """`kl_in_reward`: weight of each token's KL to the reference in its reward; needs `use_reference`. `shape` changes the
        rewards that advantages are made of; those of `drop_truncated` answers still count in their group, but teach nothing.
        """
        self.policy, self.critic = policy, critic
        self.use_reference = use_reference
        self.estimator, self.scale_by_std, self.whiten = ESTIMATORS[advantage], scale_by_std, whiten
        self.clip_filter_weight = clip_filter_weight
        self.gamma, self.lam = gamma, lam
        self.kl_in_reward, self.kl = kl_in_reward, kl.ESTIMATORS[kl_estimator]
        self.shape = shape or Shaping(longest=0)
        self.drop_truncated = drop_truncated

    def state(self) -> dict[str, Any]:
        """What experiences to come take over from those before; as JSON has it."""
        return {"moments": None if self.shape.moments is None else list(self.shape.moments.state)}

    def load_state(self, state: dict[str, Any]) -> None:
        if self.shape.moments is not None and state["moments"] is not None:
            self.shape.moments.state = tuple(state["moments"])

    def make(self, samples: Samples, *, old_log_probs: bool = True) -> Experience:
        """Without `old_log_probs` the experience has none, and the policy is left alone: its update's forward pass gives them.
        That needs a KL that is not in the reward.
        """
        rows, mask = samples.rows, samples.rows.mask
        stats = self.policy.log_probs(rows) if old_log_probs else None
        old = None if stats is None else stats.logp
        reference = self.policy.reference_log_probs(rows).logp if self.use_reference else None
        value = self.critic.values(rows) if self.critic is not None else None
        penalty = None
        if self.kl_in_reward is not None and reference is not None:
            assert old is not None, "a KL in the reward needs log-probs before the update"
            penalty = self.kl_in_reward.value * self.kl(old - reference)
        reward = self.shape(samples.reward, rows.lengths - rows.prompt_lengths)
        scored = Scored(
            reward,
            samples.group,
            mask,
            value,
            penalty,
            self.gamma,
            self.lam,
            scale_by_std=self.scale_by_std,
            clip_filter_weight=self.clip_filter_weight,
        )
        advantage = self.estimator(scored)
        taught = mask & ~samples.truncated[:, None] if self.drop_truncated else mask
        return Experience(
            tokens=rows.tokens,
            prompt_lengths=rows.prompt_lengths,
            lengths=rows.lengths,
            mask=taught,
            behaviour_logp=samples.behaviour_logp,
            old_logp=old,
            reference_logp=reference,
            advantage=whitened(advantage, taught) if self.whiten else advantage,
            old_value=value,
            returns=None if value is None else advantage + value,
            entropy=None if stats is None else stats.entropy,
            versions=samples.versions,
        )
