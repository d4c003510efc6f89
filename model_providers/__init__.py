"""Builds GPTModels from Hugging Face configs, with one module per architecture (model_type).

`description` imports no Megatron.
"""
