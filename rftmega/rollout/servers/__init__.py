"""Inference servers (vLLM, SGLang) as engines: processes, clients, protocol and health."""
