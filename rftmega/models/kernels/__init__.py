"""Kernels that every training backend shares: they know tensors and process groups, and no model."""
