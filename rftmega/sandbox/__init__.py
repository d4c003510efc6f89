"""Runs untrusted Python: `python -m rftmega.sandbox`, started by `rewards/code.py`.

This subpackage uses only the standard library.
"""
