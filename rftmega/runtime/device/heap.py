"""Returns freed memory of this process's heap to the system."""

import ctypes
from functools import cache
from typing import Any


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def trim() -> None:
    """Returns all free pages of the heap to the system, where the C library can (glibc).

    glibc keeps freed blocks of up to 32 MiB between others that are in use. With activations of
    different sizes in each step, a process on a CPU would grow from step to step.
    """
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)
