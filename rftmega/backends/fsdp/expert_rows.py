"""Chooses how transformers multiplies by the experts of an MoE layer."""

import torch
from transformers import PreTrainedModel

from rftmega.backends.decoder.tensor_plan import FUSED

ALIGNED = 16  # bytes


def make_experts_fit(model: PreTrainedModel, dtype: torch.dtype, tensor: int) -> None:
    """Makes transformers compute one expert at a time if its grouped matmul can't take the experts:
    their rows must have a multiple of 16 bytes. `tensor`: processes that share each matrix.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() != FUSED or ".experts." not in name:
            continue
        sizes = {size // parts for size in parameter.shape[1:] for parts in (1, tensor)}
        if any(size * dtype.itemsize % ALIGNED for size in sizes):
            model.set_experts_implementation("eager")
            return
