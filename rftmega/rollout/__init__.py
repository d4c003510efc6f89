"""Generates completions: inference engines, the pool that distributes requests over them, and
inference servers.
"""
