"""First module that the fork server of the ranks imports: makes the kernel end the server, and
thereby its ranks, when the launcher ends.
Otherwise the server would live for as long as one of its ranks does.
"""

import os
import signal

from rftmega.runtime.parallel.orphans import end_with_parent

LAUNCHER = "RFTMEGA_LAUNCHER"  # the launcher's process id

if LAUNCHER in os.environ:
    end_with_parent(int(os.environ.pop(LAUNCHER)), signal.SIGKILL)
