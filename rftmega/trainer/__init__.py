"""The training loop: rollout, scoring, update, weight sync. The loop is independent of ranks and
parallelism.
"""

from rftmega.trainer.algorithm import Algorithm
from rftmega.trainer.dynamic_sampler import DynamicSampler
from rftmega.trainer.learner import Learner
from rftmega.trainer.ppo import PPOTrainer

__all__ = ["Algorithm", "Learner", "PPOTrainer", "DynamicSampler"]
