"""Seeds the random generators of a process, and saves and restores their states in a
JSON-compatible form.
"""

import random
from typing import Any

import numpy
import torch


def set_seed(seed: int) -> None:
    """Seeds the generators of python, numpy and torch, on the host and on every device.
    Megatron's generators are seeded by Topology.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # also every CUDA device's, now or when it is first used


def random_state() -> dict[str, Any]:
    """Returns the states of the host's generators (python, numpy, torch) in a JSON-compatible form."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, [int(key) for key in keys], *rest],
        "torch": as_text(torch.get_rng_state()),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restores the states that `random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(as_bytes(state["torch"]))


def as_text(state: torch.Tensor) -> str:
    """Returns a random generator's state, a tensor [bytes], as hexadecimal text."""
    return bytes(state.cpu().tolist()).hex()


def as_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
