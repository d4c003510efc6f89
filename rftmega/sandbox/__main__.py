"""Runs one answer: reads a job from standard input and writes its outcome as a JSON line to
standard output.

First comes the line {"size": bytes, "tests": bytes}, then the job as JSON in as many bytes, then
the tests. The job: "answer", "seconds" (all together), "memory" (bytes), "namespaces" (true, false,
or null: find out), and either "inputs" and "limits" (bytes of output, an input), or "inside" for
tests (true: in the answer's own interpreter). Tests are read only once the answer's process is on
its own, so that no memory of it ever holds them.

The outcome: "lacks" (what is not to be had: "namespaces", "filter", "files"), and one of "passed";
"outputs" (of programs that ended well; the first that didn't ends the list); "unsupported" (why the
tests can't be asked from outside); "undecided" (what failed that is not the answer's); "refused".
Standard input stays open meanwhile: when it closes, the answer ends. Every program runs in a child
of a child: the middle one makes the namespaces, whose process 1 the program is. A job with
"imports" is the sandbox's test of itself: its outcome is "failed", which says why an answer could
not import what answers import (null: it can).
"""

import contextlib
import errno
import hmac
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rftmega.sandbox import checker, confine, imports, kernel, program, served
from rftmega.sandbox.folder import remove

REFUSED = (
    "neither namespaces nor a filter of system calls can be had here, so tested code would reach this user's files, processes "
    "and network. Allow unprivileged user namespaces (or seccomp), or start as root"
)
CONFINED = b"c"  # the first word of a program's news; then comes its wait status in four bytes
REPORT = len(CONFINED) + 4
PROGRAMS = 2  # most of one job at a time: the answer and its checker
# the machine's want, not the answer's
EXHAUSTED = (errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EMFILE, errno.ENFILE)


@dataclass
class Ended:
    """Ended holds a program's wait status (None: it was killed for time or output) and its output."""

    status: int | None
    written: bytes


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


def main() -> None:
    header = json.loads(_line())
    job = json.loads(_bytes(header["size"]))
    # within a box of root's alone, what is made for another user must be open to it
    os.umask(0o022)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    if job["namespaces"] is None:
        with tempfile.TemporaryDirectory(prefix="rftmega-probe-") as box:
            job["namespaces"] = _try(lambda: _probe_namespaces(box))
    lacks = {"namespaces": not job["namespaces"], "filter": not _try(_probe_filter)}
    lacks["files"] = lacks["namespaces"] and not _try(_probe_landlock)
    job["landlock"] = not lacks["files"]
    try:
        outcome = (
            {"refused": REFUSED}
            if lacks["namespaces"] and lacks["filter"]
            else _outcome(job, header["tests"])
        )
    except (Undecidable, MemoryError) as error:
        outcome = {"undecided": str(error) or "out of memory"}
    except OSError as error:
        if error.errno not in EXHAUSTED:
            raise
        outcome = {"undecided": str(error)}
    sys.stdout.write(json.dumps(outcome | {"lacks": lacks}) + "\n")


def _outcome(job: dict[str, Any], size: int) -> dict[str, Any]:
    if "imports" in job:
        return {"failed": imports.why_not(outputs(imports.test_job(job)))}
    if "inputs" in job:
        return {"outputs": outputs(job)}
    if job["inside"]:
        return {"passed": passes_inside(job, _bytes(size).decode())}
    return passes(job, size)


def _line() -> bytes:
    """Reads a line of standard input and not a byte more: a buffer would hold the tests."""
    line = b""
    while not line.endswith(b"\n") and (piece := os.read(0, 1)):
        line += piece
    return line


def _bytes(count: int) -> bytes:
    held = b""
    while len(held) < count:
        piece = os.read(0, min(count - len(held), 1 << 20))
        if not piece:
            raise EOFError("standard input ended within the job")
        held += piece
    return held


def passes(job: dict[str, Any], size: int) -> dict[str, Any]:
    """Runs the tests, of `size` bytes, in a process other than the answer's, which they query
    through pipes; reports whether they ran to their end.
    """
    end = time.monotonic() + job["seconds"]
    (requests, requests_in), (replies, replies_in) = os.pipe(), os.pipe()
    nowhere = os.open(os.devnull, os.O_RDWR)
    boxes: list[Box] = []
    try:
        answer = job["answer"]
        start(boxes, lambda: served.serve(answer, requests, replies_in), job, stdin=nowhere, stdout=nowhere,
              keep=[requests, replies_in])  # fmt: skip
        for descriptor in (requests, replies_in):
            os.close(descriptor)
        tests = _bytes(size).decode()  # only now: the answer's process was forked without them
        verdict, verdict_in = os.pipe()
        start(boxes, lambda: checker.check(tests, requests_in, replies, verdict_in), job, stdin=nowhere, stdout=nowhere,
              keep=[requests_in, replies, verdict_in])  # fmt: skip
        for descriptor in (requests_in, replies, verdict_in, nowhere):
            os.close(descriptor)
        ended = _watch(boxes[1], verdict, 1024, end)
        _ask_whether_confined(boxes[0])
    finally:
        _end(boxes, job)
    os.close(verdict)
    if ended.written.startswith(checker.UNSUPPORTED):
        return {"unsupported": ended.written[len(checker.UNSUPPORTED) :].decode(errors="replace")}
    return {"passed": ended.written == checker.PASSED}


def passes_inside(job: dict[str, Any], tests: str) -> bool:
    """Returns whether the tests ran to their end in the answer's interpreter.

    A token that is made after the fork proves it.
    """
    (token_out, token_in), (verdict_out, verdict_in) = os.pipe(), os.pipe()
    token = os.urandom(32)

    def work() -> int:
        program.run_tests(job["answer"], tests, token_out, verdict_in)
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
    """Runs the answer as a program on each input, up to the first that it fails with, and returns
    its outputs.
    """
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
    """Runs `work` in the sandbox until it ends, the clock reaches `end` or more than `limit` bytes
    come out of `read`.
    """
    boxes: list[Box] = []
    try:
        start(boxes, work, job, stdin=stdin, stdout=stdout, keep=keep)
        started()
        return _watch(boxes[0], read, limit, end)
    finally:
        _end(boxes, job)
        os.close(read)


def start(
    boxes: list[Box],
    work: Callable[[], int],
    job: dict[str, Any],
    *,
    stdin: int,
    stdout: int,
    keep: list[int],
) -> None:
    """Runs `work` in a sandbox of its own, which is added to `boxes`: `_end` them, come what may."""
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


def _end(boxes: list[Box], job: dict[str, Any]) -> None:
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


def _watch(box: Box, read: int, limit: int, end: float) -> Ended:
    """Reads what comes, until the program's end is reported.

    Raises Undecidable where it never was a program in a sandbox.
    """
    written, status = b"", None
    waiting = select.poll()
    for descriptor in (box.news, read, 0):
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
        elif box.news in ready:
            told = os.read(box.news, 8)
            box.told += told
            if not told:
                raise Undecidable(
                    f"a process of the sandbox ended early (it had said {box.told!r})"
                )
            if len(box.told) < REPORT:
                continue
            status = int.from_bytes(box.told[len(CONFINED) :], "little")
            os.set_blocking(read, False)
            # what is still in the pipe; a daemon may hold its other end
            with contextlib.suppress(BlockingIOError):
                while len(written) <= limit and (piece := os.read(read, 1 << 16)):
                    written += piece
    _ask_whether_confined(box)
    return Ended(status if len(written) <= limit else None, written)


def _ask_whether_confined(box: Box) -> None:
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
    """Returns whether `step` works, tried in a child process that then ends."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            step()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main()
