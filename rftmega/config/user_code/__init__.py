"""Loads user code: Python files by path, and functions by reference (FILE.py:FUNCTION)."""
