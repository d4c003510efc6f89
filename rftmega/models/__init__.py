"""TODO rftmega/models."""
