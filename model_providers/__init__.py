"""Builds Megatron GPTModels from Hugging Face configs, with one module per architecture
(model_type).
The module `description` imports no Megatron.
"""
