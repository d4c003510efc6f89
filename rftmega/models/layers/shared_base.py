"""Lets a critic use a policy's frozen weights in the same memory."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def share_base(chunks: Sequence[Any], theirs: Sequence[Any]) -> list[Tensor]:
    """Replaces the parameters and persistent buffers of `chunks` by those of the same names in
    `theirs`, and returns the shared tensors.
    `theirs`: the unwrapped chunks of a model with adapters in the same layout. Call it before
    `chunks` are wrapped or bound, so that nothing else refers to the replaced tensors.
    """
    shared = []
    for chunk, other in zip(chunks, theirs, strict=True):
        held = other.state_dict(keep_vars=True)
        for path, module in chunk.named_modules():
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    found = held.get(f"{path}.{name}")
                    if tensor is not None and found is not None:
                        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype), name
                        own[name] = found
                        shared.append(found)
    return shared
