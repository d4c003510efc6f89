"""Data types, protocols and errors that every other subpackage uses.

Input: numbers and text. Output: trajectories, samples, experience, shards. Start with types.py.
"""
