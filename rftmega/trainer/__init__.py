"""The loop: rollout, score, update, push. Has never heard of a rank."""

from rftmega.trainer.ppo import PPOTrainer

__all__ = ["PPOTrainer"]
