"""Runs to begin with: `rftmega demo` is the first."""
