"""Example: GRPO on sums of two numbers."""
