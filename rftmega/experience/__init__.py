"""From scored answers to what a loss learns from."""

from rftmega.experience.maker import ExperienceMaker
from rftmega.experience.model_reward import ModelReward
from rftmega.experience.replay import ReplayBuffer
from rftmega.experience.samples import collect, complete, scores_of
from rftmega.experience.supervised import given

__all__ = [
    "ExperienceMaker",
    "ModelReward",
    "ReplayBuffer",
    "collect",
    "complete",
    "given",
    "scores_of",
]
