"""Pure functions on tensors: advantages, losses, KL estimators, weightings. No config, no rank, no device."""
