"""Pure functions on tensors: advantages, losses, KL estimators, aggregation. No rank, no device."""
