"""TODO rftmega/backends/decoder."""
