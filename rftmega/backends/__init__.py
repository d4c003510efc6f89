"""TODO rftmega/backends."""
