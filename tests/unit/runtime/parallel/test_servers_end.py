"""A server ends with the process that started it, and no other process does."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rftmega.runtime.parallel import orphans
from rftmega.runtime.parallel.orphans import PARENT

CHILD = """
import sys, time
from rftmega.runtime.parallel.orphans import server_ends_with_parent
server_ends_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
STARTER = f"""
import os, subprocess, sys, time
own = os.environ | {{"{PARENT}": str(os.getpid() + int(sys.argv[1]))}}
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], env=own, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_process_that_no_trainer_started_as_a_server_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a container, the parent's id may be 0."""
    monkeypatch.delenv(PARENT, raising=False)
    monkeypatch.setattr(os, "getppid", lambda: 0)
    monkeypatch.setattr(orphans, "end_with_parent", lambda *given: pytest.fail(str(given)))
    orphans.server_ends_with_parent()


def lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("other", "ends"), [(0, True), (1, False)])
def test_a_server_ends_with_the_process_that_started_it(other: int, ends: bool) -> None:  # noqa: FBT001
    command = [sys.executable, "-c", STARTER, str(other)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        try:
            starter.kill()
            starter.wait()
            limit = time.monotonic() + (30 if ends else 1)
            while lives(child) and time.monotonic() < limit:
                time.sleep(0.05)
            assert lives(child) != ends
        finally:
            if lives(child):
                os.kill(child, signal.SIGKILL)
