"""Runs steps of a conversion concurrently within a memory limit."""

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from rftmega.runtime.device import heap

SPARE = 128 * 2**20  # bytes
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h
Item = TypeVar("Item")
Result = TypeVar("Result")


class Room:
    """Room is a memory budget shared by threads. `with room.of(size)` takes `size` bytes of the
    budget; it first waits until they are free, or until no other thread has any.

    Freed memory stays with the process and is reused, since the kernel takes longer to supply fresh
    pages than a copy takes. Before and after a request for more than SPARE bytes, freed memory is
    returned to the kernel.
    """

    def __init__(self, limit: int):
        self.left = self.limit = limit  # bytes
        self._changed = threading.Condition()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # glibc
            for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_ARENA_MAX, 1)):
                libc.mallopt(option, value)

    @contextmanager
    def of(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: size <= self.left or self.left == self.limit)
            self.left -= size
        self._trim(size)
        try:
            yield
        finally:
            self._trim(size)
            with self._changed:
                self.left += size
                self._changed.notify_all()

    def _trim(self, size: int) -> None:
        if size > SPARE:
            heap.trim()


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields the results of `work` over `items`, in order.

    Two items are processed at a time, so that disk and processor are busy simultaneously.
    """
    pool = ThreadPoolExecutor(2)
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
