"""Process groups, parallel layouts and communication between processes.

Only the module `topology` reads Megatron's parallel state.
"""
