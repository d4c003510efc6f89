"""Megatron's optimizers: construction, low-precision moments, and tensors to offload."""
