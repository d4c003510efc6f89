"""Loads user code: Python files by path, functions by reference."""
