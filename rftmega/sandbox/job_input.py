"""Unbuffered reading of jobs from standard input: a buffer would hold the tests."""

import os


def line() -> bytes:
    """Reads a line, or the rest of standard input."""
    held = b""
    while not held.endswith(b"\n") and (piece := os.read(0, 1)):
        held += piece
    return held


def exactly(count: int) -> bytes:
    """Reads `count` bytes. Raises EOFError if standard input ends before."""
    held = b""
    while len(held) < count:
        piece = os.read(0, min(count - len(held), 1 << 20))
        if not piece:
            raise EOFError("standard input ended within the job")
        held += piece
    return held
