"""Loads the Python that a user gives: files by their path, functions by reference."""
