"""Megatron's optimizers: builds them, stores moments in low precision, and lists the tensors to
offload.
"""
