"""Further weights of a model, kept on the host and swapped into the one that is resident."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from rftmega.megatron.binding import Bound
from rftmega.megatron.manager import MegatronModelManager


class ReferenceWeights:
    """The weights that the model has when this is built."""

    def __init__(self, manager: MegatronModelManager):
        self.manager = manager
        self._held = _copies(manager.bound)

    def swapped_in(self) -> AbstractContextManager[None]:
        """Within, the model computes with the reference; afterwards with its own weights, bit for bit."""
        return _swapped(self.manager.bound, self._held)


class AveragedWeights:
    """The exponential moving average of the weights over optimizer steps, in float32."""

    def __init__(self, manager: MegatronModelManager, beta: float):
        """Starts from the present weights; each `update` keeps the share `beta` of the average."""
        self.manager, self.beta = manager, beta
        self.restart()

    def restart(self) -> None:
        """Takes the present weights as the average."""
        self.held = _copies(self.manager.bound, torch.float32)

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step."""
        self.manager.finish_param_sync()
        for item, held in zip(self.manager.bound, self.held, strict=True):
            held.lerp_(item.parameter.detach().to("cpu", torch.float32), 1 - self.beta)

    def swapped_in(self) -> AbstractContextManager[None]:
        """Within, the model holds the average, in its own precision; afterwards its own weights, bit for bit."""
        pairs = zip(self.manager.bound, self.held, strict=True)
        return _swapped(self.manager.bound, [held.to(item.parameter.dtype, copy=True) for item, held in pairs])


def _copies(bound: Sequence[Bound], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [item.parameter.detach().to("cpu", dtype, copy=True) for item in bound]


@contextmanager
def _swapped(bound: Sequence[Bound], held: Sequence[Tensor]) -> Iterator[None]:
    _swap(bound, held)
    try:
        yield
    finally:
        _swap(bound, held)


@torch.no_grad()
def _swap(bound: Sequence[Bound], held: Sequence[Tensor]) -> None:
    """One at a time, so that there is never a third set of them."""
    for item, theirs in zip(bound, held, strict=True):
        mine = item.parameter.detach().to("cpu", copy=True)
        item.parameter.copy_(theirs)  # in place: gradient and parameter buffers alias this storage
        theirs.copy_(mine)
