"""ExperienceMaker: samples in, one Experience out. Asks the policy for log-probs and turns rewards into advantages."""

from rftmega.algorithms import kl
from rftmega.algorithms.advantages import ESTIMATORS, Scored
from rftmega.interfaces import Policy
from rftmega.types import Experience, Samples


class ExperienceMaker:
    """Advantages by one of ESTIMATORS, old log-probs of the trainer and, on request, those of the reference."""

    def __init__(
        self,
        policy: Policy,
        *,
        use_reference: bool,
        advantage: str = "group",
        scale_by_std: bool = True,
        gamma: float = 1.0,
        kl_in_reward: float = 0.0,
        kl_estimator: str = "k1",
    ):
        """`kl_in_reward`: weight of each token's KL to the reference in its reward; needs `use_reference`."""
        self.policy = policy
        self.use_reference = use_reference
        self.estimator = ESTIMATORS[advantage]
        self.scale_by_std, self.gamma = scale_by_std, gamma
        self.kl_in_reward, self.kl = kl_in_reward, kl.ESTIMATORS[kl_estimator]

    def make(self, samples: Samples) -> Experience:
        rows, mask = samples.rows, samples.rows.mask
        stats = self.policy.log_probs(rows)
        old = stats.logp
        reference = self.policy.reference_log_probs(rows).logp if self.use_reference else None
        penalty = None
        if self.kl_in_reward and reference is not None:
            penalty = self.kl_in_reward * self.kl(old - reference)
        scored = Scored(samples.reward, samples.group, mask, penalty, self.gamma, self.scale_by_std)
        return Experience(
            tokens=rows.tokens,
            prompt_lengths=rows.prompt_lengths,
            lengths=rows.lengths,
            mask=mask,
            behaviour_logp=samples.behaviour_logp,
            old_logp=old,
            reference_logp=reference,
            advantage=self.estimator(scored),
            entropy=stats.entropy,
        )
