"""Modules that replace or extend Megatron's layers: attention, norms, rotary embeddings and
adapters.
"""
