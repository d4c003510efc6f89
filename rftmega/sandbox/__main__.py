"""Runs untrusted code: reads a job from standard input and writes its outcome as a JSON line to
standard output.

Input: the line {"size": bytes, "tests": bytes}, then the job as JSON in `size` bytes, then the
tests in `tests` bytes. The job: "answer" (source text of the program under test), "seconds" (time
limit of the whole job), "memory" (bytes), "namespaces" (whether they are available: true, false, or
null: find out), and either "inputs" and "limits" (maximum bytes of output per input), or "inside"
for tests (true: in the answer's own interpreter) and "calls" (true: the tests are JSON, see
calls.py, and never run inside). Tests are read only after the answer's process was forked, so its
memory never holds them.

The outcome: "lacks" ("namespaces", "filter", "files" -> true if not available), and one of "passed"
(whether the tests ran to completion); "outputs" (of the programs that succeeded, up to the first
that failed); "unsupported" (why the tests cannot run outside the answer's interpreter); "undecided"
(a failure that the answer did not cause); "refused" (why the machine cannot confine code).

Standard input stays open while the job runs: when it closes, the answer is killed. A job with
"imports" is the sandbox's self-test: its outcome is "failed", the reason why an answer cannot
import the usual modules (null: it can). A job with "call_seconds" is an interactive interpreter
(repl.py).
"""

import contextlib
import errno
import hmac
import json
import os
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rftmega.sandbox import answer_process, checker, imports, kernel, program, repl
from rftmega.sandbox.job_input import exactly, line
from rftmega.sandbox.probes import lacking
from rftmega.sandbox.sandboxed_processes import (
    CONFINED,
    REPORT,
    Box,
    Undecidable,
    ask_whether_confined,
    end_all,
    start,
)

REFUSED = (
    "neither namespaces nor a filter of system calls can be had here, so tested code would reach this user's files, processes "
    "and network. Allow unprivileged user namespaces (or seccomp), or start as root"
)
# caused by the machine, not by the answer
EXHAUSTED = (errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EMFILE, errno.ENFILE)


@dataclass
class Ended:
    """Ended is the end of a sandboxed program: its output and its wait status, which is None if the
    program was killed for exceeding its time or output limit.
    """

    status: int | None
    written: bytes


def main() -> None:
    header = json.loads(line())
    job = json.loads(exactly(header["size"]))
    # the box belongs to root, so what is created for another user must be accessible to it
    os.umask(0o022)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    lacks = lacking(job["namespaces"])
    job["namespaces"], job["landlock"] = not lacks["namespaces"], not lacks["files"]
    try:
        outcome = (
            {"refused": REFUSED}
            if lacks["namespaces"] and lacks["filter"]
            else _outcome(job, header["tests"], lacks)
        )
    except (Undecidable, MemoryError) as error:
        outcome = {"undecided": str(error) or "out of memory"}
    except OSError as error:
        if error.errno not in EXHAUSTED:
            raise
        outcome = {"undecided": str(error)}
    sys.stdout.write(json.dumps(outcome | {"lacks": lacks}) + "\n")


def _outcome(job: dict[str, Any], size: int, lacks: dict[str, bool]) -> dict[str, Any]:
    if "call_seconds" in job:
        return repl.converse(job, lacks)
    if "imports" in job:
        return {"failed": imports.why_not(outputs(imports.test_job(job)))}
    if "inputs" in job:
        return {"outputs": outputs(job)}
    if job["inside"] and not job.get("calls"):
        return {"passed": passes_inside(job, exactly(size).decode())}
    return passes(job, size)


def passes(job: dict[str, Any], size: int) -> dict[str, Any]:
    """Runs the tests of the job, which have `size` bytes on standard input, in a separate process,
    which queries the answer's process through pipes.

    Returns {"passed": whether the tests ran to completion} or {"unsupported": reason}.
    """
    end = time.monotonic() + job["seconds"]
    (requests, requests_in), (replies, replies_in) = os.pipe(), os.pipe()
    nowhere = os.open(os.devnull, os.O_RDWR)
    boxes: list[Box] = []
    try:
        answer, are_calls = job["answer"], job.get("calls", False)
        start(boxes, lambda: answer_process.serve(answer, requests, replies_in), job, stdin=nowhere, stdout=nowhere,
              keep=[requests, replies_in])  # fmt: skip
        for descriptor in (requests, replies_in):
            os.close(descriptor)
        tests = exactly(
            size
        ).decode()  # only now, so that the answer's process was forked without them
        verdict, verdict_in = os.pipe()
        check = partial(checker.check, tests, requests_in, replies, verdict_in, are_calls=are_calls)
        start(boxes, check, job, stdin=nowhere, stdout=nowhere,
              keep=[requests_in, replies, verdict_in])  # fmt: skip
        for descriptor in (requests_in, replies, verdict_in, nowhere):
            os.close(descriptor)
        ended = _watch(boxes[1], verdict, 1024, end)
        ask_whether_confined(boxes[0])
    finally:
        end_all(boxes, job)
    os.close(verdict)
    if ended.written.startswith(checker.UNSUPPORTED):
        return {"unsupported": ended.written[len(checker.UNSUPPORTED) :].decode(errors="replace")}
    return {"passed": ended.written == checker.PASSED}


def passes_inside(job: dict[str, Any], tests: str) -> bool:
    """Returns whether the job's tests ran to completion in the interpreter of the answer (the
    tested program).

    The interpreter proves it with a random token that it receives only after the fork.
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
    """Runs the job's answer as a program on each of the job's inputs, up to the first failure, and
    returns the outputs of the programs that succeeded.
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
    """Runs `work` in a sandbox until it ends, the time `end` (of time.monotonic) is reached or the
    descriptor `read` yields more than `limit` bytes.

    `job`: limits and available features of the sandbox; `stdin`, `stdout`: descriptors of the
    program's standard streams; `keep`: further descriptors that it keeps open; `started`: called in
    this process after the fork.
    """
    boxes: list[Box] = []
    try:
        start(boxes, work, job, stdin=stdin, stdout=stdout, keep=keep)
        started()
        return _watch(boxes[0], read, limit, end)
    finally:
        end_all(boxes, job)
        os.close(read)


def _watch(box: Box, read: int, limit: int, end: float) -> Ended:
    """Reads the output of the sandboxed program `box` from the descriptor `read` until the
    program's end is reported, the output exceeds `limit` bytes or the time `end` (of
    time.monotonic) is reached.

    Raises Undecidable if no sandboxed program ever ran.
    """
    written, status = b"", None
    waiting = select.poll()
    for descriptor in (box.news, read, 0):
        waiting.register(descriptor, select.POLLIN)
    while status is None and (left := end - time.monotonic()) > 0:
        ready = dict(waiting.poll(left * 1000))
        if 0 in ready:  # the parent process is gone
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
            # the bytes left in the pipe; a daemon may hold the pipe's other end
            with contextlib.suppress(BlockingIOError):
                while len(written) <= limit and (piece := os.read(read, 1 << 16)):
                    written += piece
    ask_whether_confined(box)
    return Ended(status if len(written) <= limit else None, written)


if __name__ == "__main__":
    main()
