"""Starts, watches and ends the ranks of one node in one round of an elastic run."""

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from rftmega.core.errors import FINAL_CODES, NodeError, RFTMegaError
from rftmega.run import local_launcher
from rftmega.run.local_launcher import COMPLAINTS, STOP, TRACES
from rftmega.runtime import device
from rftmega.runtime.device import threads
from rftmega.runtime.parallel.folder_lock import process_start

RETURNED = "returned"  # folder of files named by process ids: what the work of a rank returned
SETTLE = 3.0  # seconds in which the first cause of several failures becomes known


@dataclass(frozen=True)
class Outcome:
    """Outcome is how the ranks of a node ended: `code` is the largest exit code if all returned,
    None if one died, for the `reason`. `traces`: tracebacks of ranks, by rank; `refusal`: an error
    that would only occur again.
    """

    code: int | None
    reason: str = ""
    traces: Mapping[str, str] = field(default_factory=dict)
    refusal: RFTMegaError | None = None


class NodeRanks:
    """NodeRanks are the processes of one node that take part in a round.

    Call its methods from one thread, which must live as long as the ranks: the kernel ends them with
    it.
    """

    def __init__(self, processes: int, preload: Sequence[str]):
        """Starts the server that ranks are forked from, if the device allows it; it imports the
        modules `preload`, which takes seconds, and waits for it. `processes`: ranks of this node.
        """
        threads.choose_default(processes)
        self.processes = processes
        method = device.current().start_method
        if method == "forkserver":
            local_launcher.start_server(preload)
        self._context = cast(Any, multiprocessing.get_context(method))
        if method == "forkserver":
            with local_launcher.main_of_ranks():
                first = self._context.Process(target=os.getpid)
                first.start()  # waits for the server's imports
            first.join()
        self._folder: Path | None = None
        self._ranks: list[BaseProcess] = []
        self._failed = 0.0  # when a rank was first seen dead

    def start(
        self, environment: Mapping[str, str], first: int, work: Callable[..., int], *arguments: Any
    ) -> None:
        """Starts the ranks `first` and following with work(*arguments). `environment`: variables of
        all ranks, such as WORLD_SIZE.
        """
        self.end()
        self._folder = Path(tempfile.mkdtemp(prefix="rftmega-round-"))
        for part in (COMPLAINTS, TRACES, RETURNED):
            (self._folder / part).mkdir()
        launcher = os.getpid(), process_start(os.getpid())
        with local_launcher.main_of_ranks():
            for local in range(self.processes):
                own = {
                    **environment,
                    "RANK": str(first + local),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(self.processes),
                }
                given = (own, launcher, self._folder, work, *arguments)
                name = f"rank {first + local}"
                rank = self._context.Process(target=_rank, args=given, name=name)
                rank.start()
                self._ranks.append(rank)

    @property
    def running(self) -> bool:
        """Returns whether ranks were started and not yet ended or finished."""
        return bool(self._ranks)

    def ask_to_stop(self) -> None:
        """Asks the ranks to save and stop."""
        if self._folder is not None:
            (self._folder / STOP).touch()

    def outcome(self) -> Outcome | None:
        """Returns how the ranks ended; None while they run. If one died, the others are ended."""
        codes = [rank.exitcode for rank in self._ranks]
        assert self._folder is not None
        said = sorted((self._folder / COMPLAINTS).iterdir(), key=lambda path: path.stat().st_mtime)
        if said:
            error = local_launcher.complaint_of(said[0])
            self.end()
            # hosts may be replaced; all other errors of these codes would only occur again
            final = error.exit_code in FINAL_CODES and not isinstance(error, NodeError)
            return Outcome(None, str(error), refusal=error if final else None)
        returned = self._folder / RETURNED
        died = [
            (rank, code)
            for rank, code in zip(self._ranks, codes, strict=True)
            if code is not None and not (returned / str(rank.pid)).exists()
        ]
        if died:
            self._failed = self._failed or time.monotonic()
            # a rank that lost its peer dies with an error of its own; killed ones name the cause
            killed = [each for each in died if (each[1] or 0) < 0]
            if not killed and time.monotonic() - self._failed < SETTLE:
                return None
            rank, code = (killed or died)[0]
            reason = f"{rank.name} (pid {rank.pid}) {_said(code or 0)}"
            traces = {path.name: path.read_text() for path in (self._folder / TRACES).iterdir()}
            if not killed and (told := traces.get(rank.name.removeprefix("rank "), "").strip()):
                reason = f"{rank.name} died: {told.splitlines()[-1]}"
            self.end()
            return Outcome(None, reason, traces)
        if any(code is None for code in codes):
            return None
        found = max(int((returned / str(rank.pid)).read_text()) for rank in self._ranks)
        self.end()
        return Outcome(found)

    def end(self) -> None:
        """Ends all ranks at once, with SIGKILL, and waits for them."""
        for rank in self._ranks:
            if rank.exitcode is None:
                rank.kill()
        for rank in self._ranks:
            rank.join()
            rank.close()
        self._ranks, self._failed = [], 0.0
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _said(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with {code}"


def _rank(
    environment: Mapping[str, str],
    launcher: tuple[int, int | None],
    folder: Path,
    work: Callable[..., int],
    *arguments: Any,
) -> None:
    """Runs work(*arguments) as one rank, and leaves what it returned in a file."""
    os.environ.update(environment)
    code = local_launcher.run_rank(launcher, folder, 0, True, work, *arguments)
    sys.stdout.flush()
    draft = folder / f"{os.getpid()}.code"
    draft.write_text(str(code))
    draft.rename(folder / RETURNED / str(os.getpid()))
