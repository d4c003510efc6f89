"""Ends processes with the one that started them, however that one ended.

Its imports are loaded in every process already.
"""

import ctypes
import os
import signal
import threading
import time

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Makes the kernel send this process the signal `number` when the thread of process `parent`
    that started it ends, or at once if that has ended.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_with_all(parent: int, *, look: float = 1.0, grace: float = 20.0) -> None:
    """Starts a thread that kills this process and all of its group once `parent` has not been its
    parent for `grace` seconds.

    A program may lose the signal of `end_with_parent` while it starts, or wait forever for its
    current work. `look`: seconds between two checks.
    """

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(look)
        time.sleep(grace)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=follow, name="parent", daemon=True).start()
