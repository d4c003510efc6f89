"""Text in, float out."""

from rftmega.rewards.rule import RuleReward, exact_match, matches_format

__all__ = ["RuleReward", "exact_match", "matches_format"]
