"""Ends processes when the process that started them has ended, for whatever reason.

Imports only modules that every process has loaded already.
"""

import ctypes
import os
import signal
import threading
import time

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Makes the kernel send the signal `number` to this process when its parent (the thread of
    process `parent` that started it) ends, or at once if it has ended.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_with_all(parent: int, *, look: float = 1.0, grace: float = 20.0) -> None:
    """Starts a thread that kills this process and its process group `grace` seconds after `parent`
    is no longer its parent.
    A program may lose the signal of `end_with_parent` while it starts, or wait forever for its
    current work. `look`: seconds between two checks.
    """

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(look)
        time.sleep(grace)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=follow, name="parent", daemon=True).start()
