"""LoRA modules beside weights, whole or tensor-parallel shares, without communication."""
