"""Measures how fast this processor multiplies bfloat16 matrices, compared with float32: without
instructions for bfloat16, torch takes several times as long.
"""

import time

import torch

SIZE = 384  # rows and columns: about a millisecond in float32 on one core
SECONDS = 0.1  # of both measurements together


def bfloat16_ratio(seconds: float = SECONDS) -> float:
    """Returns the time of a bfloat16 matmul divided by that of a float32 matmul, on the threads of
    this process.
    `seconds`: time that both measurements take together.
    """
    narrow, wide = (_seconds_of(dtype, seconds / 2) for dtype in (torch.bfloat16, torch.float32))
    return narrow / wide


def _seconds_of(dtype: torch.dtype, seconds: float) -> float:
    """Returns the seconds of the fastest matmul in `dtype` within about `seconds`, after a warm-up
    matmul; at least one is timed.
    """
    left, right = torch.ones(SIZE, SIZE, dtype=dtype), torch.ones(SIZE, SIZE, dtype=dtype)
    end = time.perf_counter() + seconds
    torch.mm(left, right)
    best = float("inf")
    while best == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - begin)
    return best
