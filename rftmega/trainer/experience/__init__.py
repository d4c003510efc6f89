"""Conversion of scored completions into the Experience that a loss trains on."""

from rftmega.trainer.experience.maker import ExperienceMaker
from rftmega.trainer.experience.model_reward import ModelReward, model_rewards
from rftmega.trainer.experience.replay import ReplayBuffer
from rftmega.trainer.experience.samples import collect, complete, scores_of
from rftmega.trainer.experience.supervised import given

__all__ = [
    "ExperienceMaker",
    "ModelReward",
    "ReplayBuffer",
    "collect",
    "complete",
    "given",
    "model_rewards",
    "scores_of",
]
