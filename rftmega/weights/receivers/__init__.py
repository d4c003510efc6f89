"""Receives pushed weights inside vLLM, one module per transport."""
