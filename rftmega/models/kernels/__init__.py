"""Kernels that all training backends share; they take tensors and process groups instead of models."""
