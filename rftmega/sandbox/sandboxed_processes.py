"""Starts programs in sandboxes, and kills them with all their descendants.

Every program runs in a grandchild process: the child (middle) process creates the namespaces, in
which the program is process 1.
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

CONFINED = b"c"  # first byte of a program's news, followed by its wait status in four bytes
REPORT = len(CONFINED) + 4
PROGRAMS = 2  # maximum per job: the answer and its checker


class Undecidable(Exception):
    """Undecidable is raised if the sandbox itself failed, so the answer (the tested program) can be
    neither passed nor failed.
    """


@dataclass
class Box:
    """Box is a sandboxed program as seen from the parent process.

    `folder`: its working folder; `user`: its user id; `middle`: process id of the child between
    parent and program; `news`: the pipe on which program and child report; `told`: the bytes
    received from this pipe so far, of which CONFINED is the first.
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
    """Runs `work` in a new sandbox and adds the sandbox to `boxes`; the caller must always call
    `end_all`.

    `job`: limits and available features of the sandbox; `stdin`, `stdout`: descriptors of the
    program's standard streams; `keep`: further descriptors that it keeps open.
    """
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
    """Confines this process, forked by `_middle`, before it runs tested code, and writes CONFINED
    to the pipe `news`.

    `box`: the program's folder; `user`: its user id; other arguments as of `start`.
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
            # Only with Landlock: otherwise a descriptor would also give access to sibling folders.
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
    """Kills programs and their descendants: through process 1 of their PID namespace (`namespaces`:
    whether they have one), by their user ids, or child by child as they are reparented to this
    process.
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
    """Kills all processes of the user id `user` in a single kernel call, so that none can fork in
    between.
    """
    helper = os.fork()
    if helper == 0:
        with contextlib.suppress(BaseException):
            os.setresuid(user, user, user)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(helper, 0)


def _children() -> list[int]:
    """Returns the process ids of this process's children.

    They include adopted orphans (PR_SET_CHILD_SUBREAPER).
    """
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(pid))
    return found
