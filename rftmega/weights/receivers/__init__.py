"""TODO rftmega/weights/receivers."""
