"""Custom modules for Megatron's layers: attention, norms, rotary embeddings and adapters."""
