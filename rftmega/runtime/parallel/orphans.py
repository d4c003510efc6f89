"""Processes that end with the one that started them, however that one ended.

What this imports is in every process already.
"""

import ctypes
import os
import signal
import threading
import time

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Has the kernel send this process the signal `number` when the thread of process `parent` that
    started it ends. Where that is over already, it gets it at once.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_with_all(parent: int, *, look: float = 1.0, grace: float = 20.0) -> None:
    """Starts a thread that ends this process and all of its group once `parent` has not been its
    parent for `grace` seconds: a program may lose the signal of `end_with_parent` while it starts,
    or wait for ever for what it was doing. `look`: seconds between two looks.
    """

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(look)
        time.sleep(grace)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=follow, name="parent", daemon=True).start()
