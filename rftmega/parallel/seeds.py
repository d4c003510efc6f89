"""One seed for every generator of a process."""

import random

import numpy
import torch


def set_seed(seed: int) -> None:
    """Seeds python, numpy and torch, on the host and on every device. Megatron's streams are the Topology's."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # also every CUDA device's, now or when it is first used
