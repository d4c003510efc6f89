"""Conversion between Hugging Face folders and Megatron's distributed checkpoints."""
