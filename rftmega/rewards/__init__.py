"""Rewards turn the text of an answer into a number."""

from rftmega.rewards.create import check_prompts, create
from rftmega.rewards.majority import MajorityReward

__all__ = ["MajorityReward", "check_prompts", "create"]
