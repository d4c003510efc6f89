"""Ends processes when the process that started them has ended, for whatever reason.

Imports only modules that every process has loaded already.
"""

import ctypes
import os
import signal
import threading
import time

PR_SET_PDEATHSIG = 1
PARENT = "RFTMEGA_SERVER_PARENT"  # pid of the process that a server ends with


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Makes the kernel send the signal `number` to this process when its parent ends, or at once if
    it has ended.

    `parent`: process id of the parent. The kernel watches the thread of the parent that started
    this process.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def server_ends_with_parent() -> None:
    """Makes this process end with its parent, if it is a server that the parent has started: called
    in the server, since code between fork and exec (preexec_fn) can hang in a process with threads
    that use process groups.
    """
    parent = os.environ.get(PARENT)
    if parent == str(os.getppid()):  # not in the processes that a server starts
        end_with_parent(int(parent), signal.SIGTERM)


def end_with_all(parent: int, *, look: float = 1.0, grace: float = 20.0) -> None:
    """Starts a thread that kills this process and its process group `grace` seconds after the
    process with id `parent` has ceased to be its parent.

    For programs that may lose the signal of `end_with_parent` while they start, or wait forever for
    their current work. `look`: seconds between two checks.
    """

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(look)
        time.sleep(grace)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=follow, name="parent", daemon=True).start()
