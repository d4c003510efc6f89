"""Epochs iterates over a dataset epoch by epoch and resumes within an epoch. If the data have
changed, the resumed epoch continues with the items that it has not used yet.
"""

import functools
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Examples(list[T]):
    """Examples is a list of a dataset's examples. `identities` holds one number per example that
    identifies its record (see `identity_of`).
    """

    def __init__(self, examples: Sequence[T], identities: Sequence[int]):
        super().__init__(examples)
        self.identities = identities

    def where(self, holds: Callable[[T], bool]) -> "Examples[T]":
        """Returns the examples for which `holds` is true, in their order."""
        kept = [
            (example, identity)
            for example, identity in zip(self, self.identities, strict=True)
            if holds(example)
        ]
        return Examples([example for example, _ in kept], [identity for _, identity in kept])


class Epochs(Generic[T]):
    """Epochs is an endless stream of `items`; each epoch contains all items in a new random order,
    which depends on `seed` and the epoch.
    """

    def __init__(self, items: Sequence[T], seed: int | str):
        self.items = items
        self.seed = seed
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)
        self._handed_out = functools.lru_cache(maxsize=2)(self._identities_in_order)
        # After a resume the epoch restarts: after `_taken` items, without those of `_seen`.
        self._taken, self._epoch = 0, 0
        self._seen = torch.empty(0, dtype=torch.int64)
        self._rest: list[int] | None = None

    def at(self, taken: int) -> T:
        """Returns the item at position `taken` of the stream (0: the first item of the first
        epoch).
        """
        epoch, offset = self._place(taken)
        return self.items[self._order_of(epoch)[offset]]

    def state(self, taken: int) -> dict[str, Any]:
        """Returns the state from which `load_state` resumes after `taken` items: {"taken", "epoch",
        "seen"}, where "seen" [n] int64 holds the identities (see `identity_of`) of the items that
        the epoch has used. The caller must not change this tensor.
        """
        epoch, offset = self._place(taken)
        resumed = self._rest is not None and epoch == self._epoch
        offset += len(self._seen) if resumed else 0
        return {"taken": taken, "epoch": epoch, "seen": self._handed_out(epoch)[:offset]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from `state`, a value that the method `state` returned: the epoch continues with
        the items that it has not used yet, even if the items or the seed have changed.
        """
        self._taken, self._epoch, self._seen = state["taken"], state["epoch"], state["seen"]
        seen = Counter(self._seen.tolist())
        rest = []
        for item in self._order(self._epoch):
            own = int(self._identities[item])
            if seen[own]:
                seen[own] -= 1
            else:
                rest.append(item)
        self._rest = rest
        self._handed_out.cache_clear()

    def _place(self, taken: int) -> tuple[int, int]:
        """Returns (epoch, offset): the epoch that contains position `taken` of the stream, and the
        position within this epoch or, in a resumed epoch, within its remaining items.
        """
        if self._rest is None:
            return divmod(taken, max(len(self.items), 1))
        past = taken - self._taken
        if past < len(self._rest):
            return self._epoch, past
        epoch, offset = divmod(past - len(self._rest), len(self.items))
        return self._epoch + 1 + epoch, offset

    def _order_of(self, epoch: int) -> list[int]:
        if self._rest is not None and epoch == self._epoch:
            return self._rest
        return self._order(epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.items)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def _identities_in_order(self, epoch: int) -> Tensor:
        """Returns the identities of an epoch's items in the order in which the items are used."""
        own = self._identities[torch.tensor(self._order_of(epoch), dtype=torch.int64)]
        resumed = self._rest is not None and epoch == self._epoch
        return torch.cat([self._seen, own]) if resumed else own

    @functools.cached_property
    def _identities(self) -> Tensor:
        known = (
            self.items.identities
            if isinstance(self.items, Examples)
            else [identity_of(repr(item)) for item in self.items]
        )
        return torch.tensor(known, dtype=torch.int64)


def identity_of(content: str) -> int:
    """Returns a 64-bit number that identifies a record by its content, the same in every run and
    process.
    """
    digest = hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
