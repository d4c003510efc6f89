"""Kernels shared by all training backends; they take tensors and process groups, and no models."""
