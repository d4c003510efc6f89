"""Modules that Megatron's layers are built of here: attention, norms and rotary embeddings."""
