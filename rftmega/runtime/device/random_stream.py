"""RandomStream is a separate stream of a device's random numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rftmega.runtime import device


class RandomStream:
    """RandomStream continues from use to use, and leaves the default stream unchanged."""

    def __init__(self, seed: int):
        where = device.current().here()
        self.state = torch.Generator(where).manual_seed(seed).get_state()

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Makes the device draw from this stream within a `with` block."""
        here = device.current()
        usual = here.random_state()
        here.set_random_state(self.state)
        try:
            yield
        finally:
            self.state = here.random_state()
            here.set_random_state(usual)
