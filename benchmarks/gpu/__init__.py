"""Measures what one CUDA device does: `python -m benchmarks.gpu`.

On a CPU the same code runs at small sizes, to show that it works.
"""
