"""TODO rftmega/monitoring/performance."""
