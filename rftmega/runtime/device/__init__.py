"""Device abstraction with one class for CUDA and one for the CPU; all uses of `torch.cuda` are
here.
"""

import functools

import torch

from rftmega.runtime.device.cpu import CPU
from rftmega.runtime.device.cuda import CUDA

Device = CPU | CUDA


@functools.cache
def current() -> Device:
    """Returns the device backend of this process: CUDA if torch sees a device, otherwise the
    CPU.
    """
    return CUDA() if torch.cuda.is_available() else CPU()


__all__ = ["CPU", "CUDA", "Device", "current"]
