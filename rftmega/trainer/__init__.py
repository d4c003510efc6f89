"""The loop: rollout, score, update, push. Has never heard of a rank."""

from rftmega.trainer.algorithm import Algorithm
from rftmega.trainer.learner import Learner
from rftmega.trainer.ppo import PPOTrainer
from rftmega.trainer.sampling import Refill

__all__ = ["Algorithm", "Learner", "PPOTrainer", "Refill"]
