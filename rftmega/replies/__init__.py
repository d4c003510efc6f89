"""Reads what servers reply and what a roster says. Nothing of it is trusted: what is wrong is the server's fault."""
