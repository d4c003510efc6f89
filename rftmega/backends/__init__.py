"""Training backends: Megatron-Core and FSDP2, and the runner and optimizers for them."""
