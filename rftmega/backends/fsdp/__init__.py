"""FSDP2 backend: trains any decoder that transformers builds, with its rows sharded over the
processes.
"""
