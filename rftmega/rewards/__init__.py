"""Text in, float out."""

from rftmega.rewards.create import check_prompts, create

__all__ = ["check_prompts", "create"]
