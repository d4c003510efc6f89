"""In which order prompts are used: epochs without repetition, each shuffled by its own seed."""

import functools
import random
from collections.abc import Iterator, Sequence

from rftmega.types import Prompt


class PromptOrder:
    """An endless stream of batches. `position` counts prompts handed out and is all that a resume needs."""

    def __init__(self, prompts: Sequence[Prompt], *, batch_size: int, seed: int, position: int = 0):
        self.prompts = prompts
        self.batch_size = batch_size
        self.seed = seed
        self.position = position

    def __iter__(self) -> Iterator[list[Prompt]]:
        while True:
            batch = [self._prompt(self.position + i) for i in range(self.batch_size)]
            self.position += self.batch_size
            yield batch

    def _prompt(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self.prompts))
        return self.prompts[_epoch_order(self.seed, epoch, len(self.prompts))[offset]]


@functools.lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


class ResumableSampler:
    """Indices of a data set, epoch by epoch: each `iter` is (the rest of) the next one. For torch's DataLoader."""

    def __init__(self, size: int, *, shuffle: bool, seed: int, consumed: int = 0, per_epoch: int | None = None):
        """`consumed`: samples that were used before, over all epochs, of `per_epoch` each (less than `size` where a last, smaller
        batch is dropped).
        """
        self.size, self.shuffle, self.seed = size, shuffle, seed
        self.per_epoch = size if per_epoch is None else per_epoch
        self.epoch, self.offset = divmod(consumed, self.per_epoch) if self.per_epoch else (0, 0)

    def __iter__(self) -> Iterator[int]:
        order = _epoch_order(self.seed, self.epoch, self.size) if self.shuffle else range(self.size)
        begin, self.epoch, self.offset = self.offset, self.epoch + 1, 0
        return iter(order[begin:])

    def __len__(self) -> int:
        return self.size - self.offset
