"""Process groups, parallel layouts and communication between processes.

`topology` alone reads Megatron's parallel state.
"""
