"""Reinforcement fine-tuning of language models on Megatron-Core, with vLLM as the rollout engine."""
