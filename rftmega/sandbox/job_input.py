"""Reads jobs from standard input, and not a byte more: a buffer would hold the tests."""

import os


def line() -> bytes:
    """Reads a line; at the end of standard input what there is."""
    held = b""
    while not held.endswith(b"\n") and (piece := os.read(0, 1)):
        held += piece
    return held


def exactly(count: int) -> bytes:
    """Reads so many bytes. Raises EOFError where standard input ends before."""
    held = b""
    while len(held) < count:
        piece = os.read(0, min(count - len(held), 1 << 20))
        if not piece:
            raise EOFError("standard input ended within the job")
        held += piece
    return held
