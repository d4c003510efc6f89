"""Megatron's optimizers: built, their moments in fewer bits, and what of them takes memory."""
