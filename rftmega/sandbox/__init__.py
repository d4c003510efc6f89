"""Runs untrusted Python: `python -m rftmega.sandbox`, started by `rewards/code.py`.

Only the standard library.
"""
