"""Training backends: Megatron-Core and FSDP2, with the model runner and optimizers that they
share.
"""
