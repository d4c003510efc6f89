"""The trained model on torch's FSDP2: any decoder that transformers builds, its rows sharded over
the processes.
"""
