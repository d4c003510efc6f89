"""Columns hold a value, or a vector, for each token of each row."""
