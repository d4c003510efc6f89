"""RandomStream is a sequence of random numbers that is separate from the device's default
generator.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rftmega.runtime import device


class RandomStream:
    """RandomStream stores the state of a random generator: each use continues where the last one
    ended, and leaves the device's default generator unchanged.
    """

    def __init__(self, seed: int):
        where = device.current().here()
        self.state = torch.Generator(where).manual_seed(seed).get_state()

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Makes the device draw its random numbers from this stream within a `with` block."""
        here = device.current()
        usual = here.random_state()
        here.set_random_state(self.state)
        try:
            yield
        finally:
            self.state = here.random_state()
            here.set_random_state(usual)
