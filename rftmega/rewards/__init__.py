"""Rewards score the text of responses."""

from rftmega.rewards.create import check_prompts, create
from rftmega.rewards.majority import MajorityReward
from rftmega.rewards.reasoning import Reasoning

__all__ = ["MajorityReward", "Reasoning", "check_prompts", "create"]
