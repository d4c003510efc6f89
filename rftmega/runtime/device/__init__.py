"""The one place that says `torch.cuda`: what the program needs of a device, one class a back-end."""

import functools

import torch

from rftmega.runtime.device.cpu import CPU
from rftmega.runtime.device.cuda import CUDA

Device = CPU | CUDA


@functools.cache
def current() -> Device:
    """Returns the back-end of this process: CUDA where torch sees one, otherwise the CPU."""
    return CUDA() if torch.cuda.is_available() else CPU()


__all__ = ["CPU", "CUDA", "Device", "current"]
