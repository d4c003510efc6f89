"""Pure functions on tensors: advantages, losses, KL estimators and loss aggregation, independent of
ranks and devices.
"""
