"""TODO rftmega/runtime."""
