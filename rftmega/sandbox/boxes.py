"""Starts programs in sandboxes, and ends them with all that they started.

Every program runs in a child of a child: the middle one makes the namespaces, whose process 1 the
program is.
"""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rftmega.sandbox import confine, imports, kernel
from rftmega.sandbox.folder import remove

CONFINED = b"c"  # the first word of a program's news; then comes its wait status in four bytes
REPORT = len(CONFINED) + 4
PROGRAMS = 2  # most of one job at a time: the answer and its checker


class Undecidable(Exception):
    """The sandbox itself failed, so nothing is known about the answer."""


@dataclass
class Box:
    """Box is a sandboxed program as this process sees it.

    `told`: what its news said so far, first that it is confined.
    """

    folder: str
    user: int
    middle: int
    news: int
    told: bytes = b""


def start(
    boxes: list[Box],
    work: Callable[[], int],
    job: dict[str, Any],
    *,
    stdin: int,
    stdout: int,
    keep: list[int],
) -> None:
    """Runs `work` in a sandbox of its own, which is added to `boxes`: `end_all` them, come what may."""
    folder = tempfile.mkdtemp(prefix="rftmega-code-")
    user = (
        confine.FIRST_USER + PROGRAMS * os.getpid() + len(boxes)
        if os.getuid() == 0
        else os.getuid()
    )
    news, news_in = os.pipe()
    boxes.append(Box(folder, user, 0, news))
    middle = os.fork()
    if middle == 0:
        with contextlib.suppress(BaseException):
            _middle(work, job, folder, user, stdin, stdout, keep, news_in)
        os._exit(1)
    boxes[-1].middle = middle
    os.close(news_in)


def end_all(boxes: list[Box], job: dict[str, Any]) -> None:
    _kill_all(boxes, namespaces=job["namespaces"])
    for box in boxes:
        os.close(box.news)
        remove(box.folder)


def _middle(
    work: Callable[[], int],
    job: dict[str, Any],
    box: str,
    user: int,
    stdin: int,
    stdout: int,
    keep: list[int],
    news: int,
) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if job["namespaces"]:
        confine.enter_namespaces()
    inner = os.fork()
    if inner == 0:
        status = 1
        with contextlib.suppress(BaseException):
            _confine(job, box, user, stdin, stdout, keep, news)
            status = work()
        os._exit(status)
    confine.keep_only([news])
    _, status = os.waitpid(inner, 0)
    os.write(news, status.to_bytes(4, "little"))
    os._exit(0)


def _confine(
    job: dict[str, Any], box: str, user: int, stdin: int, stdout: int, keep: list[int], news: int
) -> None:
    """Makes this process, which `_middle` forked, one that tested code may run in, and says so in
    `news`.
    """
    for here, there in ((stdin, 0), (stdout, 1)):
        os.dup2(here, there)
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    confine.keep_only([*keep, news])
    opened: dict[str, int] = {}
    if job["namespaces"]:
        confine.enter_private_root(box)
        where = confine.WORK
    else:
        if os.getuid() == 0:
            os.chown(box, user, user)
            # Only with Landlock: without it a descriptor would lead to its folder's neighbours too.
            opened = imports.open_folders(confine.python_folders()) if job["landlock"] else {}
            imports.import_through(opened)
        os.chdir(box)
        where = box
    os.environ.update({"HOME": where, "TMPDIR": where})
    tempfile.tempdir = None
    confine.limit(seconds=job["seconds"], memory=job["memory"])
    confine.drop_privileges(user)
    if not job["namespaces"]:
        confine.restrict_files(where, opened)
    confine.filter_system_calls(own_pid=None if job["namespaces"] else os.getpid())
    os.write(news, CONFINED)
    os.close(news)


def ask_whether_confined(box: Box) -> None:
    os.set_blocking(box.news, False)
    with contextlib.suppress(BlockingIOError):
        box.told += os.read(box.news, 8)
    if not box.told.startswith(CONFINED):
        raise Undecidable("the sandbox could not be set up for the answer, or not in time")


def _kill_all(boxes: list[Box], *, namespaces: bool) -> None:
    """Ends programs and all that they started: with process 1, or by their users, or child by child
    as they become ours.
    """
    for box in boxes:
        with contextlib.suppress(ProcessLookupError):
            if box.middle:
                os.kill(box.middle, signal.SIGKILL)  # the program has asked to die with it
    while True:
        if os.getuid() == 0 and not namespaces:
            for box in boxes:
                _kill_user(box.user)
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _kill_user(user: int) -> None:
    """Kills by the kernel's own loop over processes: nothing is born in between."""
    helper = os.fork()
    if helper == 0:
        with contextlib.suppress(BaseException):
            os.setresuid(user, user, user)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(helper, 0)


def _children() -> list[int]:
    """Returns processes whose parent this is.

    Those whose own parent died are among them (PR_SET_CHILD_SUBREAPER).
    """
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(pid))
    return found
