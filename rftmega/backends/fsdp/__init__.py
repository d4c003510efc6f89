"""FSDP2 backend: trains any decoder that transformers can build, with each parameter's rows sharded
over the processes.
"""
