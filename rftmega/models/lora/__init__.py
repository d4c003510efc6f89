"""Modules with a low-rank product beside a weight, which are whole or shares: they know no process."""
