"""Math reward: math-verify compares expressions in worker processes, because it can limit its time
only by signals to a main thread.
"""

import json
import queue
import re
import select
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rftmega.core.errors import RewardError
from rftmega.rewards.part import Answer, Undecided

STARTING = 120.0  # seconds: imports from a cold disk
LABEL_SECONDS = 60.0  # time limit for parsing a label, before training on a busy machine
NUMBER = re.compile(r"-?\d+(\.\d+)?")  # labels that certainly can be parsed
GRACE = 10.0  # seconds beyond the worker's own alarm, before it is killed from here


class MathWorker:
    """MathWorker runs one worker process that compares expressions; the process is started at the
    first comparison and again after every timeout.

    Only one thread at a time may use it.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.process: subprocess.Popen[str] | None = None

    def equal(self, response: str | None, label: str) -> float:
        """Returns 1 if the response's last expression equals the label's expression, 0 otherwise.
        For a response None, returns 1 if the label can be parsed as an expression, else 0.

        Returns Undecided if the comparison takes too long or ends the process. Raises RewardError
        if the process cannot be started.
        """
        said = self._asked(response, label)
        return Undecided() if said is None else float(said)

    def answer_in(self, response: str) -> str | None:
        """Returns the source of the response's last expression, which is compared with labels; None
        if there is none or reading takes too long. Raises RewardError if the process cannot be
        started.
        """
        said = self._asked(response, None)
        return said if isinstance(said, str) and said else None

    def _asked(self, response: str | None, label: str | None) -> Any:
        """Returns what the worker process replies; None if it takes too long or ends."""
        if self.process and self.process.poll() is not None:
            self.close()  # it was ended meanwhile, for reasons unrelated to this response
        process = self.process or self._start()
        said = ""
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps([response, label, self.seconds]) + "\n")
            process.stdin.flush()
            said = self._line(process, self.seconds + GRACE)
        except BrokenPipeError:
            pass  # it is dead already, as after a time-out
        finally:
            if not said.endswith("\n"):
                self.close()
        return json.loads(said) if said.endswith("\n") else None

    def close(self) -> None:
        """Kills the worker process; the next comparison starts a new process."""
        if self.process:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdout, self.process.stdin):
                try:
                    assert pipe is not None
                    pipe.close()
                except BrokenPipeError:
                    pass  # unwritten data for the dead process
            self.process = None

    def _start(self) -> "subprocess.Popen[str]":
        script = Path(__file__).with_name("math_worker.py")
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        # -P: keeps math.py beside the script from shadowing the module math
        command = [sys.executable, "-P", str(script)]
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, encoding="utf-8"
        )
        if self._line(self.process, STARTING) != "ready\n":
            self.close()
            raise RewardError(
                f"reward.math: `{' '.join(command)}` doesn't start. Run it by hand to see why (is math-verify there?)."
            )
        return self.process

    @staticmethod
    def _line(process: "subprocess.Popen[str]", seconds: float) -> str:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        return process.stdout.readline() if ready else ""


class MathPart:
    """MathPart is the reward component that compares responses with labels by math-verify. All
    scoring threads share its `workers` worker processes; `seconds`: time limit of one comparison.
    """

    def __init__(self, *, workers: int, seconds: float):
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="math-reward")
        self.free: queue.LifoQueue[MathWorker] = (
            queue.LifoQueue()
        )  # the last used worker first: it is warm
        for _ in range(workers):
            self.free.put(MathWorker(seconds))

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        asked = [(answer.response, answer.label) for answer in answers]
        return list(self.threads.map(self._score, asked))

    def read(self, labels: Sequence[str]) -> list[float]:
        """Returns one score per label: 1 if it can be parsed as an expression, else 0."""
        return list(self.threads.map(self._score, [(None, label) for label in labels]))

    def answer_in(self, response: str) -> str | None:
        """Returns the source of the expression in a response that is compared with labels; None if
        there is none.
        """
        with self._worker() as worker:
            return worker.answer_in(response)

    def close(self) -> None:
        """Ends the worker processes; without this call they end when this process ends."""
        self.threads.shutdown()
        while not self.free.empty():
            self.free.get().close()

    def _score(self, asked: tuple[str | None, str]) -> float:
        with self._worker() as worker:
            return worker.equal(*asked)

    @contextmanager
    def _worker(self) -> Iterator[MathWorker]:
        """Lends a free worker, once there is one."""
        worker = self.free.get()
        try:
            yield worker
        finally:
            self.free.put(worker)


def complaints(labels: Iterable[str], *, workers: int) -> dict[str, str]:
    """Returns label -> error message for the labels that cannot be parsed as expressions; parses in
    `workers` processes.
    """
    unsure = [label for label in dict.fromkeys(labels) if not NUMBER.fullmatch(label)]
    part = MathPart(workers=workers, seconds=LABEL_SECONDS)
    try:
        read = part.read(unsure)
    finally:
        part.close()
    return {
        label: f"the label {label!r} holds no expression that math-verify can read: write one in LaTeX, or plain"
        for label, found in zip(unsure, read, strict=True)
        if not found
    }
