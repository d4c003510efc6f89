"""Additional copies of a model's weights (reference policy, moving average), kept on the host and
swapped into the model temporarily.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rftmega.runtime import device
from rftmega.runtime.device.residency import ALIGNMENT, Residency

Tensors = Callable[[], list[Tensor]]  # of a model, as they currently are


class ReferenceWeights:
    """ReferenceWeights keeps a host copy of the weights that the model has when this object is
    created, e.g. for the KL penalty.
    """

    def __init__(self, residency: Residency, tensors: Tensors):
        """Copies the model's weights to the host.

        `residency`: moves the model's tensors between device and host, and swaps the copy in;
        `tensors`: returns the model's current weights, detached from autograd.
        """
        self._residency, self._tensors = residency, tensors
        weights = tensors()
        self._held = _host_buffers(weights)
        for held, weight in zip(self._held, weights, strict=True):
            held.copy_(weight)

    def swapped_in(self) -> AbstractContextManager[None]:
        """Makes the model compute with the reference weights within a `with` block, and restores
        the model's own weights afterwards, bit for bit.
        """
        return self._residency.replaced(zip(self._tensors(), self._held, strict=True))


class AveragedWeights:
    """AveragedWeights keeps the exponential moving average of a model's weights over optimizer
    steps, in float32 on the host.
    """

    def __init__(self, residency: Residency, tensors: Tensors, beta: float):
        """Starts the average at the current weights; each `update` sets it to beta * average + (1 -
        beta) * weights.

        `residency`: moves the model's tensors between device and host, and swaps the average in;
        `tensors`: returns the model's current weights, detached from autograd.
        """
        self._residency, self._tensors, self.beta = residency, tensors, beta
        self._latest = _host_buffers(tensors())
        self._thread = ThreadPoolExecutor(1, "average")
        self._averaging: Future[None] | None = None
        self.restart()

    @property
    def held(self) -> list[Tensor]:
        """Returns the averaged weights, in the order of the model's tensors; waits for an update in
        progress.
        """
        if self._averaging is not None:
            self._averaging.result()
            self._averaging = None
        return self._held

    def restart(self) -> None:
        """Sets the average to the current weights."""
        self._averaging = None
        self._held = [tensor.to("cpu", torch.float32, copy=True) for tensor in self._tensors()]

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average after an optimizer step: copies the weights to the host and updates
        the average in a thread, while the device continues.
        """
        held = self.held  # the result of the previous update
        self._residency.finish()
        wait = self._residency.copy_aside(zip(self._tensors(), self._latest, strict=True))

        def average() -> None:
            wait()
            for mean, latest in zip(held, self._latest, strict=True):
                mean.lerp_(latest.float(), 1 - self.beta)

        self._averaging = self._thread.submit(average)

    def swapped_in(self) -> AbstractContextManager[None]:
        """Makes the model compute with the averaged weights, cast to its own dtype, within a `with`
        block, and restores its own weights afterwards, bit for bit.
        """
        return self._residency.replaced(zip(self._tensors(), self.held, strict=True))


def _host_buffers(tensors: list[Tensor]) -> list[Tensor]:
    """Returns, for each given tensor, an uninitialised host tensor of its shape and dtype; all are
    parts of one host buffer that is fast to copy to and from the device.
    """
    places = []
    end = 0
    for tensor in tensors:
        places.append(slice(end, end + tensor.nbytes))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = device.current().host_buffer(end, torch.uint8)
    return [
        buffer[place].view(tensor.dtype).view(tensor.shape)
        for place, tensor in zip(places, tensors, strict=True)
    ]
