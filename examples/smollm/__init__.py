"""Example: GRPO of a published model, SmolLM2-135M-Instruct, on sums of two numbers."""
