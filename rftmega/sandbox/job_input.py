"""Unbuffered reading of jobs from standard input, because a buffer would hold the tests before the
answer's process is forked.
"""

import os


def line() -> bytes:
    """Reads and returns a line, or the remaining input if it has no line end."""
    held = b""
    while not held.endswith(b"\n") and (piece := os.read(0, 1)):
        held += piece
    return held


def exactly(count: int) -> bytes:
    """Reads and returns `count` bytes. Raises EOFError if standard input ends earlier."""
    held = b""
    while len(held) < count:
        piece = os.read(0, min(count - len(held), 1 << 20))
        if not piece:
            raise EOFError("standard input ended within the job")
        held += piece
    return held
