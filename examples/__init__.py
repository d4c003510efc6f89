"""Example runs; start with `rftmega demo`."""
