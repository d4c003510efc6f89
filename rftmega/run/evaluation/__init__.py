"""Evaluation of a model without training: `rftmega evaluate`."""
