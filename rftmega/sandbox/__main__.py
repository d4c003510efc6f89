"""One answer's run: a job as a JSON line on standard input, an outcome as a JSON line on standard output.

The job: "answer", "seconds" (all together), "memory" (bytes), "namespaces" (true, false, or null: find out), and either "tests",
or "inputs" and "limits" (bytes of output, an input). The outcome: "lacks" (what is not to be had: "namespaces", "filter",
"files"), and "passed", or "outputs" (of programs that ended well; the first that didn't ends the list), or "refused". Standard
input stays open meanwhile: when it closes, the answer ends. Every program runs in a child of a child: the middle one makes the
namespaces, whose process 1 the program is. A job with "imports" is the sandbox's test of itself: its outcome is "failed", which
says why an answer could not import what answers import (null: it can).
"""

import contextlib
import hmac
import json
import os
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rftmega.sandbox import confine, imports, kernel, program

REFUSED = (
    "neither namespaces nor a filter of system calls can be had here, so tested code would reach this user's files, processes "
    "and network. Allow unprivileged user namespaces (or seccomp), or start as root"
)


@dataclass
class Ended:
    """How a program ended: its wait status (None: it was killed for time or output) and what it wrote."""

    status: int | None
    written: bytes


def main() -> None:
    os.umask(0o022)  # whatever the trainer's: the user that an answer is must get to its folder
    job = json.loads(sys.stdin.buffer.readline())
    os.umask(0o022)  # within a box of root's alone, what is made for another user must be open to it
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    if job["namespaces"] is None:
        with tempfile.TemporaryDirectory(prefix="rftmega-probe-") as box:
            job["namespaces"] = _try(lambda: _probe_namespaces(box))
    lacks = {"namespaces": not job["namespaces"], "filter": not _try(_probe_filter)}
    lacks["files"] = lacks["namespaces"] and not _try(_probe_landlock)
    job["landlock"] = not lacks["files"]
    if lacks["namespaces"] and lacks["filter"]:
        outcome: dict[str, Any] = {"refused": REFUSED}
    elif "imports" in job:
        outcome = {"failed": imports.why_not(outputs(imports.test_job(job)))}
    elif "tests" in job:
        outcome = {"passed": passes(job)}
    else:
        outcome = {"outputs": outputs(job)}
    sys.stdout.write(json.dumps(outcome | {"lacks": lacks}) + "\n")


def passes(job: dict[str, Any]) -> bool:
    """Whether the tests ran to their end; proved with a token that is made after the fork, so no other process has it."""
    (token_out, token_in), (verdict_out, verdict_in) = os.pipe(), os.pipe()
    token = os.urandom(32)

    def work() -> int:
        program.run_tests(job["answer"], job["tests"], token_out, verdict_in)
        return 0

    nowhere = os.open(os.devnull, os.O_RDWR)
    end = time.monotonic() + job["seconds"]

    def started() -> None:
        for descriptor in (token_out, verdict_in, nowhere):
            os.close(descriptor)
        os.write(token_in, token)
        os.close(token_in)

    ended = execute(work, job, stdin=nowhere, stdout=nowhere, keep=[token_out, verdict_in], read=verdict_out, limit=256, end=end,
                    started=started)  # fmt: skip
    return hmac.compare_digest(ended.written, program.proof(token))


def outputs(job: dict[str, Any]) -> list[str]:
    """What the answer, as a program, writes for each input, up to the first that it fails with."""
    end, found = time.monotonic() + job["seconds"], []
    for text, limit in zip(job["inputs"], job["limits"], strict=True):
        out, out_in = os.pipe()
        given = os.memfd_create("input")
        with open(given, "wb", closefd=False) as file:
            file.write(text.encode(errors="surrogatepass"))
        os.lseek(given, 0, os.SEEK_SET)

        def started(descriptors: tuple[int, ...] = (out_in, given)) -> None:
            for descriptor in descriptors:
                os.close(descriptor)

        ended = execute(lambda: program.run_program(job["answer"]), job, stdin=given, stdout=out_in, keep=[], read=out,
                        limit=limit, end=end, started=started)  # fmt: skip
        if ended.status != 0:
            break
        found.append(ended.written.decode(errors="replace"))
    return found


def execute(
    work: Callable[[], int],
    job: dict[str, Any],
    *,
    stdin: int,
    stdout: int,
    keep: list[int],
    read: int,
    limit: int,
    end: float,
    started: Callable[[], None],
) -> Ended:
    """Runs `work` in the sandbox until it ends, the clock reaches `end` or more than `limit` bytes come out of `read`."""
    box = tempfile.mkdtemp(prefix="rftmega-code-")
    user = confine.FIRST_USER + os.getpid() if os.getuid() == 0 else os.getuid()
    news, news_in = os.pipe()
    token_in = [fd for fd in (news, read) if fd > 2]
    middle = os.fork()
    if middle == 0:
        with contextlib.suppress(BaseException):
            for descriptor in token_in:
                os.close(descriptor)
            _middle(work, job, box, user, stdin, stdout, keep, news_in)
        os._exit(1)
    os.close(news_in)
    try:
        started()
        return _watch(news, read, limit, end)
    finally:
        _kill_all(middle, user, namespaces=job["namespaces"])
        for descriptor in (news, read):
            os.close(descriptor)
        _remove(box)


def _middle(
    work: Callable[[], int], job: dict[str, Any], box: str, user: int, stdin: int, stdout: int, keep: list[int], news: int
) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if job["namespaces"]:
        confine.enter_namespaces()
    inner = os.fork()
    if inner == 0:
        status = 1
        with contextlib.suppress(BaseException):
            _confine(job, box, user, stdin, stdout, keep)
            status = work()
        os._exit(status)
    confine.keep_only([news])
    _, status = os.waitpid(inner, 0)
    os.write(news, status.to_bytes(4, "little"))
    os._exit(0)


def _confine(job: dict[str, Any], box: str, user: int, stdin: int, stdout: int, keep: list[int]) -> None:
    """Makes this process, which `_middle` forked, one that tested code may run in."""
    for here, there in ((stdin, 0), (stdout, 1)):
        os.dup2(here, there)
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    confine.keep_only(keep)
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


def _watch(news: int, read: int, limit: int, end: float) -> Ended:
    """Reads what comes, until the program's end is reported."""
    written, status = b"", None
    waiting = select.poll()
    for descriptor in (news, read, 0):
        waiting.register(descriptor, select.POLLIN)
    while status is None and (left := end - time.monotonic()) > 0:
        ready = dict(waiting.poll(left * 1000))
        if 0 in ready:  # whoever started this is gone
            break
        if read in ready:
            piece = os.read(read, 1 << 16)
            written += piece
            if not piece:
                waiting.unregister(read)
            if len(written) > limit:
                break
        elif news in ready:
            told = os.read(news, 4)
            if not told:
                break
            status = int.from_bytes(told, "little")
            os.set_blocking(read, False)
            with contextlib.suppress(BlockingIOError):  # what is still in the pipe; a daemon may hold its other end
                while len(written) <= limit and (piece := os.read(read, 1 << 16)):
                    written += piece
    return Ended(status if len(written) <= limit else None, written)


def _kill_all(middle: int, user: int, *, namespaces: bool) -> None:
    """Ends the program and all that it started: with its process 1, or by its user, or child by child as they become ours."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(middle, signal.SIGKILL)  # the program has asked to die with it
    while True:
        if os.getuid() == 0 and not namespaces:
            _kill_user(user)
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
    """The kernel's own loop over processes: nothing is born in between."""
    helper = os.fork()
    if helper == 0:
        with contextlib.suppress(BaseException):
            os.setresuid(user, user, user)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(helper, 0)


def _children() -> list[int]:
    """Processes whose parent this is; those whose own parent died are among them (PR_SET_CHILD_SUBREAPER)."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(pid))
    return found


def _remove(box: str) -> None:
    """Removes a folder whatever the answer made of its permissions."""

    def open_up(function: Callable[[str], Any], path: str, error: Any) -> None:
        for each in (os.path.dirname(path), path):
            with contextlib.suppress(OSError):
                if not stat.S_ISLNK(os.lstat(each).st_mode):
                    os.chmod(each, 0o700)
        with contextlib.suppress(OSError):
            function(path) if function in (os.unlink, os.rmdir) else shutil.rmtree(path, onerror=open_up)

    if os.path.isdir(box):
        shutil.rmtree(box, onerror=open_up)


def _probe_namespaces(box: str) -> None:
    confine.enter_namespaces()
    if os.fork():
        _, status = os.wait()
        os._exit(status >> 8)
    confine.enter_private_root(box)  # a folder of its own, as in a run: Python may lie below /tmp


def _probe_filter() -> None:
    if not confine.filter_system_calls(own_pid=None):
        raise OSError


def _probe_landlock() -> None:
    if not confine.restrict_files(tempfile.gettempdir()):
        raise OSError


def _try(step: Callable[[], None]) -> bool:
    """Whether `step` works, in a child that is then gone."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            step()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main()
