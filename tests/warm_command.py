"""Run `train_rl.py` as a user starts it, in a process forked from one that has imported its modules.

A start takes a fraction of a second instead of ten. The server that the command forks its ranks from
is forked as well. All else is as in a process of its own: arguments, environment, working directory,
output, signal handlers, exit code.
"""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path

from tests.ranks import CONTEXT, start_in

PRELOADED = "tests.preloaded_command"
STARTED = dict(os.environ)  # what the server's modules see


def tests_begin() -> None:
    """Note the environment: modules that were imported since have added to it, as cv2 does."""
    STARTED.clear()
    STARTED.update(os.environ)


def is_alike(environment: dict[str, str]) -> bool:
    """Return whether modules imported in `environment` would be those of the server."""

    def known(given: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in given.items() if not name.startswith("PYTEST_")}

    return known(environment) == known(STARTED)


def run_warm(
    program: Path,
    arguments: Sequence[str],
    *,
    folder: Path,
    timeout: float,
    path: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program in `folder` and wait. It finds modules in `path`, otherwise beside itself.

    Raises subprocess.TimeoutExpired.
    """
    with tempfile.TemporaryDirectory() as written:
        files = [Path(written) / name for name in ("stdout", "stderr")]
        process = CONTEXT.Process(
            target=_command,
            args=(
                program,
                list(arguments),
                folder,
                path or program.parent,
                files,
                dict(os.environ),
            ),
        )
        start_in([process], PRELOADED)
        process.join(timeout)
        command = [sys.executable, str(program), *arguments]
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            raise subprocess.TimeoutExpired(
                command, timeout, *(path.read_bytes() for path in files)
            )
        stdout, stderr = (path.read_text(errors="replace") for path in files)
        assert process.exitcode is not None
        return subprocess.CompletedProcess(command, process.exitcode, stdout, stderr)


def _command(
    program: Path,
    arguments: list[str],
    folder: Path,
    modules: Path,
    files: list[Path],
    environment: dict[str, str],
) -> None:
    """Be the process of the program."""
    import torch

    os.setsid()
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ |= environment
    os.chdir(folder)
    sys.path[0:0] = [str(modules)]
    sys.argv[:] = [str(program), *arguments]
    util.spawnv_passfds = _forked
    if not any("--processes" in argument for argument in arguments):  # nothing is forked from here
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        atexit._run_exitfuncs()


_spawned = util.spawnv_passfds


def _forked(path: bytes, arguments: list[str], kept: Sequence[int]) -> int:
    """Start the server of a launcher's ranks by a fork, in place of multiprocessing's own start."""
    code = arguments[-1]
    if "multiprocessing.forkserver" not in code:
        return _spawned(path, arguments, kept)
    if pid := os.fork():
        return pid
    try:
        for number in signal.valid_signals():  # as exec leaves them
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        sys.modules.pop("rftmega.runtime.parallel.fork_server", None)  # its import does something
        atexit._clear()
        exec(code, {})
    finally:
        os._exit(1)
