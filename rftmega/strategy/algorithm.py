"""What a config's `algorithm` section makes of the pure parts: an experience maker and a loss."""

from rftmega.algorithms.losses import policy_loss
from rftmega.algorithms.mismatch import Correction
from rftmega.algorithms.surrogates import Clip
from rftmega.algorithms.weighting import weighting_of
from rftmega.config import RunConfig
from rftmega.experience import ExperienceMaker
from rftmega.interfaces import Policy
from rftmega.types import LossFn


def maker_of(config: RunConfig, policy: Policy) -> ExperienceMaker:
    chosen = config.algorithm
    return ExperienceMaker(
        policy,
        use_reference=chosen.kl_coef > 0,
        advantage=chosen.advantage,
        scale_by_std=chosen.scale_by_std,
        gamma=chosen.gamma,
        kl_in_reward=chosen.kl_coef if chosen.kl_in == "reward" else 0.0,
        kl_estimator=chosen.kl_estimator,
    )


def loss_of(config: RunConfig) -> LossFn:
    chosen = config.algorithm
    return policy_loss(
        surrogate=chosen.surrogate,
        clip=Clip(chosen.clip_low, chosen.clip_high, chosen.dual_clip, chosen.drift_coef),
        correction=Correction(chosen.correction, chosen.correction_cap),
        high_entropy_share=chosen.high_entropy_share,
        kl_coef=chosen.kl_coef if chosen.kl_in == "loss" else 0.0,
        kl_estimator=chosen.kl_estimator,
        entropy_coef=chosen.entropy_coef,
        weighting=weighting_of(chosen.weighting, longest=config.rollout.max_response_tokens),
    )
