"""Nodes of an elastic run on this machine: supervisors as users start them, and what can happen to
them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


class Node:
    """Node is a supervisor of this name and all processes that it has started."""

    def __init__(
        self,
        name: str,
        config: Path,
        options: Sequence[str],
        *,
        nodes: str,
        processes: int = 1,
        lease: float = 4.0,
    ):
        self.name, self.log = name, Path(_output_of(options)) / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            str(ROOT / "train_rl.py"),
            str(config),
            *options,
            "--elastic",
            nodes,
        ]
        command += ["--processes", str(processes), "--node", name, "--address", "127.0.0.1"]
        command += ["--lease-seconds", str(lease)]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all processes of the node."""
        for process in self.processes():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def processes(self) -> list[psutil.Process]:
        """Returns the node's processes, the supervisor first."""
        try:
            supervisor = psutil.Process(self.process.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """Ends all processes of the node at once, as a power cut does."""
        gone = self.processes()
        self.signal(signal.SIGKILL)
        self.process.wait(timeout=30)
        psutil.wait_procs(gone, timeout=30)

    def end(self, seconds: float = 120) -> int:
        """Returns the exit code of the supervisor."""
        return self.process.wait(timeout=seconds)

    @property
    def said(self) -> str:
        return self.log.read_text()


def steps_of(output: Path) -> int:
    """Returns the number of steps that the run has written."""
    try:
        return len((output / "metrics.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def rounds_of(output: Path) -> list[dict[str, object]]:
    """Returns the rounds of an elastic run so far."""
    folder = output / "elastic/rounds"
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def until(happened: Callable[[], bool], nodes: Sequence[Node], seconds: float = 120) -> float:
    """Waits until something has happened; returns the seconds that it took."""
    begin = time.monotonic()
    while not happened():
        if time.monotonic() - begin > seconds:
            raise AssertionError("\n".join(f"{node.name}:\n{node.said}" for node in nodes))
        time.sleep(0.05)
    return time.monotonic() - begin


def _output_of(options: Sequence[str]) -> str:
    return next(o.partition("=")[2] for o in options if o.startswith("trainer.output="))
