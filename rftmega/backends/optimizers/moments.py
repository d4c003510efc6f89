"""Gives access to Adam's moments in any storage format: their memory and their float32 values."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rftmega.runtime.device.residency import Residency


def memory_of(moment: Any) -> list[Tensor]:
    """Returns the plain tensors that store a moment: codes and scales of an 8-bit moment, otherwise
    the moment itself.
    """
    if not is_traceable_wrapper_subclass(moment):
        return [moment]
    names, _ = moment.__tensor_flatten__()
    return [getattr(moment, name) for name in names]


class MomentValues:
    """MomentValues reads moments as float32 values for a checkpoint, and writes restored values
    back.
    """

    def __init__(self, residency: Residency):
        """Stores `residency`, which knows whether the tensors of the optimizer and its model are on
        the device or offloaded to the host.
        """
        self._residency = residency
        self._copies: list[tuple[Any, Tensor]] = []

    def of(self, moment: Any) -> Tensor:
        """Returns a moment's values in float32: a view if it is stored in float32, otherwise a copy
        on the host.
        Copies are on the host because a save needs the values of all parameters at once.
        """
        if is_traceable_wrapper_subclass(moment):
            names, context = moment.__tensor_flatten__()
            parts = {name: self._residency.host(getattr(moment, name)).cpu() for name in names}
            size, stride = moment.shape, moment.stride()
            whole: Any = moment.__tensor_unflatten__(parts, context, size, stride)
            copy: Tensor = whole.dequantize()
        elif moment.dtype == torch.float32:
            return self._residency.host(moment)
        else:
            copy = self._residency.host(moment).cpu().float()
        self._copies.append((moment, copy))
        return copy

    @torch.no_grad()
    def take_back(self) -> None:
        """Writes the copies that `of` returned, filled by now, back into their moments."""
        for moment, copy in self._copies:
            if not is_traceable_wrapper_subclass(moment):
                self._residency.host(moment).copy_(copy)
                continue
            from rftmega.backends.optimizers.low_precision_adam import packed

            parts: Any = moment
            kept = self._residency.host(parts.codes)
            codes, scales = packed(copy.to(kept.device), parts)
            kept.copy_(codes)
            self._residency.host(parts.scale).copy_(scales)
        self._copies.clear()
