"""Benchmarks of a single CUDA device: `python -m benchmarks.gpu`.

On a CPU the same code runs at small sizes, as a test.
"""
