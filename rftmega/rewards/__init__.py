"""Rewards turn the text of an answer into a number."""

from rftmega.rewards.create import check_prompts, create
from rftmega.rewards.majority import MajorityReward
from rftmega.rewards.reasoning import Reasoning

__all__ = ["MajorityReward", "Reasoning", "check_prompts", "create"]
