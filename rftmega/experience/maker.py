"""ExperienceMaker: samples in, one Experience out. Asks the policy for log-probs and turns rewards into advantages."""

from rftmega.algorithms.advantages import group_normalised
from rftmega.interfaces import Policy
from rftmega.types import Experience, Samples


class ExperienceMaker:
    """Group-normalised advantages (GRPO), old log-probs of the trainer and, on request, those of the reference."""

    def __init__(self, policy: Policy, *, use_reference: bool, scale_by_std: bool = True):
        self.policy = policy
        self.use_reference = use_reference
        self.scale_by_std = scale_by_std

    def make(self, samples: Samples) -> Experience:
        rows, mask = samples.rows, samples.rows.mask
        advantage = group_normalised(samples.reward, samples.group, scale_by_std=self.scale_by_std)
        return Experience(
            tokens=rows.tokens,
            prompt_lengths=rows.prompt_lengths,
            lengths=rows.lengths,
            mask=mask,
            behaviour_logp=samples.behaviour_logp,
            old_logp=self.policy.log_probs(rows).logp,
            reference_logp=self.policy.reference_log_probs(rows).logp if self.use_reference else None,
            advantage=advantage[:, None] * mask,
        )
