"""Describes transformers decoders: their configs, the positions of Hugging Face tensors in their
parameters, and their tensor-parallel plans.
"""
