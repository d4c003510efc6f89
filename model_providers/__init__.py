"""Hugging Face config -> TransformerConfig -> GPTModel: one file a family.

`description` imports no Megatron.
"""
