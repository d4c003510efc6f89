"""Processes that score responses with libraries of others, and the pool that scoring threads share:
a library may hang, end its process, or limit its time only by signals to a main thread.
"""

import json
import queue
import select
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from rftmega.core.errors import RewardError

STARTING = 120.0  # seconds: imports from a cold disk
GRACE = 10.0  # seconds beyond the process's own limit, before it is killed from here


class ScorerProcess:
    """ScorerProcess runs a command that writes the line "ready", then answers each line of JSON with
    one line of JSON. The process is started at the first request and again after every timeout.

    Only one thread at a time may use it.
    """

    def __init__(
        self,
        command: Sequence[str],
        seconds: float,
        *,
        part: str,
        hint: str,
        environment: Mapping[str, str] | None = None,
    ):
        """`seconds`: the command's own time limit of one request. `part`: option of the reward
        component, and `hint`: what to look at, for the error if the command does not start.
        `environment`: environment variables of the process; None: those of this process.
        """
        self.command, self.seconds = command, seconds
        self.part, self.hint, self.environment = part, hint, environment
        self.process: subprocess.Popen[str] | None = None

    def ask(self, request: Any) -> Any:
        """Returns the reply to `request`, both JSON-serializable; None if the process takes too long
        or ends. Raises RewardError if the process cannot be started.
        """
        if self.process and self.process.poll() is not None:
            self.close()  # it was ended meanwhile, for reasons unrelated to this request
        process = self.process or self._start()
        said = ""
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            said = self._line(process, self.seconds + GRACE)
        except BrokenPipeError:
            pass  # it is dead already, as after a time-out
        finally:
            if not said.endswith("\n"):
                self.close()
        return json.loads(said) if said.endswith("\n") else None

    def close(self) -> None:
        """Kills the process; the next request starts a new process."""
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
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(
            self.command,
            stdin=pipe,
            stdout=pipe,
            stderr=nowhere,
            text=True,
            encoding="utf-8",
            env=self.environment,
        )
        if self._line(self.process, STARTING) != "ready\n":
            self.close()
            raise RewardError(
                f"{self.part}: `{' '.join(self.command)}` doesn't start. Run it by hand to see why ({self.hint})."
            )
        return self.process

    @staticmethod
    def _line(process: "subprocess.Popen[str]", seconds: float) -> str:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        return process.stdout.readline() if ready else ""


Scorer = TypeVar("Scorer", bound=ScorerProcess)
Asked = TypeVar("Asked")
Told = TypeVar("Told")


class ScorerPool(Generic[Scorer]):
    """ScorerPool holds the processes that all scoring threads share."""

    def __init__(self, make: Callable[[], Scorer], *, workers: int, name: str):
        """`make` creates one of the `workers` processes; `name` begins the names of the threads that
        wait for them.
        """
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self.free: queue.LifoQueue[Scorer] = (
            queue.LifoQueue()
        )  # the last used one first: it is warm
        for _ in range(workers):
            self.free.put(make())

    def map(self, score: Callable[[Scorer, Asked], Told], asked: Sequence[Asked]) -> list[Told]:
        """Returns `score`(process, each) for each of `asked`, in their order."""

        def scored(each: Asked) -> Told:
            with self.lent() as process:
                return score(process, each)

        return list(self.threads.map(scored, asked))

    @contextmanager
    def lent(self) -> Iterator[Scorer]:
        """Lends a free process, once there is one."""
        process = self.free.get()
        try:
            yield process
        finally:
            self.free.put(process)

    def close(self) -> None:
        """Ends the processes; without this call they end when this process ends."""
        self.threads.shutdown()
        while not self.free.empty():
            self.free.get().close()
