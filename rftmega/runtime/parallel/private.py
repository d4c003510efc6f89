"""Keeps the files of a run, which may contain prompts, paths and environment variables, unreadable
for other users.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def keep_private() -> None:
    """Sets the umask so that files of this process and its children are hidden from other users;
    the group may read them only if the umask allowed it before.
    """
    os.umask(os.umask(0o077) | 0o007)


@contextmanager
def private_files() -> Iterator[None]:
    """Applies `keep_private` within a `with` block, and restores the umask afterwards."""
    before = os.umask(0o077)
    os.umask(before)
    keep_private()
    try:
        yield
    finally:
        os.umask(before)
