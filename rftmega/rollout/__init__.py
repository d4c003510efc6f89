"""TODO rftmega/rollout."""
