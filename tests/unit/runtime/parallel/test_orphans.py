"""A program that loses the signal of its parent's death ends all the same, with what it started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[4]
DEAF = """
import os, signal, subprocess, sys, time
from rftmega.runtime.parallel.orphans import end_with_all
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
end_with_all(os.getppid(), look=0.05, grace=0.2)
print(os.getpid(), child.pid, flush=True)
time.sleep(100)
"""
PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True).wait()"


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_program_that_does_not_hear_it_ends_with_its_own_children() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, DEAF], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    deaf, child = map(int, parent.stdout.readline().split())
    time.sleep(0.5)
    assert alive(deaf) and alive(child), "while its parent lives it goes on"
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while (alive(deaf) or alive(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(deaf)
    assert not alive(child)
