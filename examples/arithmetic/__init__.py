"""Sums of two numbers."""
