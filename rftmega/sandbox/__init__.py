"""Runs Python that nobody has read: `python -m rftmega.sandbox`, started by `rewards/code.py`. Only the standard library."""
