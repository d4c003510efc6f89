"""Processes that end with the one that started them, however that one ended. What this imports is in every process already."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """From now on this process gets the signal `number` when the thread of process `parent` that started it ends. Where that is
    over already, it gets it at once.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
