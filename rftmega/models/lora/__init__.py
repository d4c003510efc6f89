"""LoRA modules for whole weights or tensor-parallel shares of weights, without communication."""
