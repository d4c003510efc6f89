"""Moves the policy's weights to inference servers: through shared memory, a process group, or
files.
"""
