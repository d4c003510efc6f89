"""First import of the server that ranks are forked from: the server ends with the launcher, and its
ranks with it.

By itself the server lives for as long as one of its ranks does.
"""

import os
import signal

from rftmega.runtime.parallel.orphans import end_with_parent

LAUNCHER = "RFTMEGA_LAUNCHER"  # the launcher's process id

if LAUNCHER in os.environ:
    end_with_parent(int(os.environ.pop(LAUNCHER)), signal.SIGKILL)
