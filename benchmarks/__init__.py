"""Benchmarks of ratios, each measured within one run on one machine; `make bench` prints them and
writes runs/bench.json.
"""
