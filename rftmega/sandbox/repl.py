"""Interactive interpreter in the sandbox, which runs one snippet of code after another.

It is a job of `python -m rftmega.sandbox` with "seconds" (CPU time of each process), "call_seconds"
(wall-clock time of one snippet), "memory" and "namespaces". After the job each snippet is sent as
the line {"size": bytes} and the code. Standard output has the JSON line {"ready": true, "lacks":
...}, and then one line for each snippet: "text" (its output), "failed", and "ended", the reason why
the interpreter is gone (null: it still runs). When the interpreter is gone, or standard input
closes, the whole sandbox ends.

The code cannot kill the sandbox's process, write to its standard output, or report a failure of the
sandbox. It shares its process with the loop that runs it, and so can write to the pipe of replies.
That pipe only reports that a snippet has ended, and whether it raised, after a word that is random
for each snippet. Code that reads the word from the loop's frames can end its own snippet early, and
hide that it raised, as `except` can. The next snippet has another word.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from rftmega.sandbox import interpreter
from rftmega.sandbox.job_input import exactly, line
from rftmega.sandbox.sandboxed_processes import CONFINED, REPORT, Box, Undecidable, end_all, start

SETUP = 60.0  # seconds within which the code's process must be confined
KEPT = 128 << 10  # bytes kept of the beginning, and of the end, of a piece's output
WORD = 16  # bytes of the random word at the start of a reply
HEARD = 256  # last bytes of the reply pipe that are inspected; a reply is shorter
DRAINED = 1 << 20  # maximum bytes read after a piece has ended: other processes may go on writing


@dataclass
class Output:
    """Output keeps the first and the last KEPT bytes of a snippet's output, and counts
    the bytes.
    """

    first: bytearray = field(default_factory=bytearray)
    last: bytearray = field(default_factory=bytearray)
    size: int = 0

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        room = KEPT - len(self.first)
        self.first += piece[:room]
        self.last += piece[room:]
        if len(self.last) > 2 * KEPT:
            del self.last[:-KEPT]

    def text(self) -> str:
        last = self.last[-KEPT:]
        lost = self.size - len(self.first) - len(last)
        note = f"\n[... {lost} bytes left out ...]\n".encode() if lost else b""
        return (self.first + note + last).decode(errors="replace")


@dataclass
class Pipes:
    """Descriptors of the sandbox process's ends of the pipes to an interpreter."""

    requests: int
    replies: int
    output: int


def converse(job: dict[str, Any], lacks: dict[str, bool]) -> dict[str, Any]:
    """Runs snippets of code as they arrive on standard input. Returns {} when standard input or the
    interpreter ends. Raises Undecidable if the sandbox, not the code, failed.

    `job`: the job described above; `lacks`: sandbox features that this machine lacks, which the
    first line of the output reports.
    """
    boxes: list[Box] = []
    try:
        pipes = _started(boxes, job)
        _await_confinement(boxes[0], time.monotonic() + SETUP)
        _say({"ready": True, "lacks": lacks})
        while header := line():
            code = exactly(json.loads(header)["size"])
            if (reply := _run(boxes[0], pipes, code, job["call_seconds"])) is None:
                break
            _say(reply)
            if reply["ended"]:
                break
    finally:
        end_all(boxes, job)
    return {}


def _started(boxes: list[Box], job: dict[str, Any]) -> Pipes:
    (requests, requests_in), (replies, replies_in) = os.pipe(), os.pipe()
    output, output_in = os.pipe()
    nowhere = os.open(os.devnull, os.O_RDWR)
    start(
        boxes,
        lambda: interpreter.serve(requests, replies_in),
        job,
        stdin=nowhere,
        stdout=output_in,
        keep=[requests, replies_in],
    )
    for descriptor in (requests, replies_in, output_in, nowhere):
        os.close(descriptor)
    for descriptor in (requests_in, replies, output):
        os.set_blocking(descriptor, False)
    return Pipes(requests_in, replies, output)


def _await_confinement(box: Box, end: float) -> None:
    waiting = select.poll()
    waiting.register(box.news, select.POLLIN)
    while not box.told and (left := end - time.monotonic()) > 0:
        if waiting.poll(left * 1000) and not _receive(box):
            break
    if not box.told.startswith(CONFINED):
        raise Undecidable("the sandbox could not be set up for the code, or not in time")


def _run(box: Box, pipes: Pipes, code: bytes, seconds: float) -> dict[str, Any] | None:
    """Runs the snippet `code` and returns its reply, the dictionary to print; None if standard
    input closed before the snippet ended.

    `box`, `pipes`: sandbox of the interpreter and the pipes to it; `seconds`: time limit of the
    snippet.
    """
    end = time.monotonic() + seconds
    output, said, well = Output(), b"", False
    word = os.urandom(WORD).hex()
    endings = {interpreter.reply(word, well=well): well for well in (True, False)}
    unsent = json.dumps({"size": len(code), "word": word}).encode() + b"\n" + code
    waiting = select.poll()
    for descriptor in (0, box.news, pipes.output, pipes.replies):
        waiting.register(descriptor, select.POLLIN)
    waiting.register(pipes.requests, select.POLLOUT)
    ended = f"it took longer than {seconds:g} s"
    while (left := end - time.monotonic()) > 0:
        ready = dict(waiting.poll(left * 1000))
        if 0 in ready:  # the parent process is gone
            return None
        if pipes.requests in ready:
            unsent = _sent(pipes.requests, unsent)
            if not unsent:
                waiting.unregister(pipes.requests)
        if pipes.output in ready and not _drain(pipes.output, output, 1 << 16):
            waiting.unregister(pipes.output)  # the code closed it
        if pipes.replies in ready:
            piece = _read(pipes.replies)
            said = (said + piece)[-HEARD:]
            if not piece:
                waiting.unregister(pipes.replies)
            if heard := [good for ending, good in endings.items() if ending in said]:
                ended, well = "", all(heard)
                break
        elif box.news in ready:
            ended = _end_of(box)
            if ended:
                break
    _drain(pipes.output, output, DRAINED)
    return {
        "text": output.text(),
        "failed": not well,
        "ended": ended or None,
    }


def _sent(descriptor: int, unsent: bytes) -> bytes:
    """Writes as many of the bytes `unsent` as the pipe accepts. Returns the remaining bytes; b"" if
    the reader is gone.
    """
    try:
        return unsent[os.write(descriptor, unsent) :]
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        return b""


def _read(descriptor: int) -> bytes:
    """Returns at most HEARD / 2 bytes of the pipe, so that earlier output of the code cannot hide a
    reply after it; b"" if the pipe is empty or at its end.
    """
    try:
        return os.read(descriptor, HEARD // 2)
    except BlockingIOError:
        return b""


def _drain(descriptor: int, output: Output, most: int) -> bool:
    """Moves the contents of a pipe into `output`, up to about `most` bytes. Returns False at the
    pipe's end, otherwise True.
    """
    with contextlib.suppress(BlockingIOError):
        while most > 0:
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                return False
            output.add(piece)
            most -= len(piece)
    return True


def _receive(box: Box) -> bool:
    """Appends the bytes on the pipe `box.news` to `box.told`. Returns False at the pipe's end,
    otherwise True.
    """
    told = os.read(box.news, 8)
    box.told += told
    return bool(told)


def _end_of(box: Box) -> str:
    """Returns a text on how the interpreter ended; "" if it still runs. Raises Undecidable if the
    sandbox ended instead.
    """
    if not _receive(box):
        raise Undecidable(f"a process of the sandbox ended early (it had said {box.told!r})")
    if len(box.told) < REPORT:
        return ""
    code = os.waitstatus_to_exitcode(int.from_bytes(box.told[len(CONFINED) :], "little"))
    if code >= 0:
        return f"it ended with exit status {code}"
    name = signal.Signals(-code).name
    limits = ", as a limit of memory or processor time does" if code == -signal.SIGKILL else ""
    return f"it was ended by {name}{limits}"


def _say(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
