"""Keeps files of a run private, which may contain prompts, paths and an environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def keep_private() -> None:
    """Hides files that this process and its children write from now on from other users, and from
    the group unless the umask let it read before.
    """
    os.umask(os.umask(0o077) | 0o007)


@contextmanager
def private_files() -> Iterator[None]:
    """Keeps files written within a `with` block private, see `keep_private`."""
    before = os.umask(0o077)
    os.umask(before)
    keep_private()
    try:
        yield
    finally:
        os.umask(before)
