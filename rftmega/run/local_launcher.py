"""Starts N ranks of the same program on this machine, through torchrun's agent."""

import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from setproctitle import setproctitle
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing import api as elastic
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rftmega.core import errors
from rftmega.core.errors import FAULTS, RFTMegaError
from rftmega.runtime import device
from rftmega.runtime.device import threads
from rftmega.runtime.parallel import fork_server, preemption
from rftmega.runtime.parallel.folder_lock import process_start
from rftmega.runtime.parallel.orphans import end_with_parent
from rftmega.runtime.parallel.watchdog import HUNG

FROZEN = "rftmega.runtime.parallel.frozen_imports"  # after all other imports
GRACE = 2.0  # seconds
# Ranks that are killed leave semaphores. multiprocessing's tracker removes them, without a warning.
LEAKED = "ignore:resource_tracker:UserWarning"
COMPLAINTS, STOP = "complaints", "stop"
TRACES = "traces"  # folder in which ranks leave their tracebacks, if the launcher made it


def launch(
    processes: int,
    work: Callable[..., int],
    *arguments: Any,
    preload: Sequence[str],
    max_restarts: int = 0,
    stops: bool = False,
) -> int:
    """Runs work(*arguments) on `processes` ranks and waits for them.

    Returns the exit code for this process: the largest that `work` returned if all ranks finished.
    If one rank fails, all are ended, and restarted up to `max_restarts` times.

    With `stops`, SIGTERM and SIGUSR1 are stop requests that ranks see (`preemption.asked`);
    without `stops`, these signals end the ranks like Ctrl-C. Ranks end with this process, however
    it ends. If the device allows it, they are forked from a server that has imported the modules
    `preload` once, since imports take most of the start-up time. Raises the RFTMegaError that a
    rank raised, without a restart: the error would only occur again.
    """
    threads.choose_default(processes)
    DynamicRendezvousHandler._create_tcp_store_server = _store  # type: ignore[assignment, method-assign]
    # the agent's failures are reported below; each of its loggers has a level of its own
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if device.current().start_method == "forkserver":
        start_server(preload)
    launcher = os.getpid(), process_start(os.getpid())
    with tempfile.TemporaryDirectory() as told, tempfile.TemporaryDirectory() as agent_files:
        folder = Path(told)
        (folder / COMPLAINTS).mkdir()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id="local",
            rdzv_backend="c10d",
            rdzv_configs={"store_type": "file"},  # a TCP store would also listen to other hosts
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            start_method=device.current().start_method,
            logs_specs=DefaultLogsSpecs(log_dir=agent_files),
        )
        with _signals(folder / STOP if stops else None) as came, main_of_ranks():
            for restarts in range(max_restarts + 1):
                try:
                    # a finished rendezvous stays closed
                    config.rdzv_endpoint = f"{agent_files}/rendezvous{restarts}"
                    given = (launcher, folder, restarts, stops, work, *arguments)
                    return max(elastic_launch(config, run_rank)(*given).values())
                except ChildFailedError as error:
                    if said := sorted(
                        (folder / COMPLAINTS).iterdir(), key=lambda path: path.stat().st_mtime
                    ):
                        raise complaint_of(said[0]) from None
                    then = (
                        f"all start again ({restarts + 1} of {max_restarts})"
                        if restarts < max_restarts
                        else "this is the end"
                    )
                    sys.stderr.write(
                        f"error: {_what(error)}; the other ranks were ended, {then}.\n"
                    )
                except SignalException:
                    sys.stderr.write(f"stopped by {came[0].name}; all ranks were ended.\n")
                    return 128 + came[0]
    return 1


def complaint_of(complaint: Path) -> RFTMegaError:
    """Returns the RFTMegaError that a rank wrote to the file `complaint`: its class and exit code
    on the first line, then the message.
    """
    head, _, message = complaint.read_text().partition("\n")
    name, code = head.split()
    kind = getattr(errors, name, RFTMegaError)  # of a user's own: not there
    error: RFTMegaError = kind(message)
    error.exit_code = int(code)
    return error


def _what(error: ChildFailedError) -> str:
    rank, first = error.get_first_failure()
    if first.exitcode < 0:
        return f"rank {rank} (pid {first.pid}) was killed by {signal.Signals(-first.exitcode).name}"
    return f"rank {rank} (pid {first.pid}) exited with {first.exitcode}" + " (it hung)" * (
        first.exitcode == HUNG
    )


def _store(handler: DynamicRendezvousHandler, address: str, port: int) -> TCPStore:
    """Opens the ranks' rendezvous TCP store on the loopback interface, at `address` and `port`.
    Replaces a method of `handler`'s class, since torch's own store would listen to other hosts,
    too.
    """
    listener = socket.create_server((address, port))
    bound = listener.getsockname()[1]
    return TCPStore(
        address, bound, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def start_server(preload: Sequence[str]) -> None:
    """Starts the server that ranks are forked from, which imports the modules `preload`, ignores
    stop signals from the start, and ends with this process.
    """
    multiprocessing.set_forkserver_preload([fork_server.__name__, *preload, FROZEN])
    os.environ[fork_server.LAUNCHER] = str(os.getpid())
    filters = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (filters, LEAKED)))
    handlers = {
        number: signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGINT, *preemption.SIGNALS)
    }
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[fork_server.LAUNCHER], os.environ["PYTHONWARNINGS"]
        if filters is not None:
            os.environ["PYTHONWARNINGS"] = filters
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def main_of_ranks() -> Iterator[None]:
    """Makes processes that multiprocessing starts within a `with` block use rank_main.py as their
    main module.
    """
    main = sys.modules["__main__"]
    before, main.__spec__ = main.__spec__, find_spec("rftmega.run.rank_main")
    try:
        yield
    finally:
        main.__spec__ = before


@contextmanager
def _signals(stop_file: Path | None) -> Iterator[list[signal.Signals]]:
    """Makes the first Ctrl-C or SIGTERM end the ranks within a `with` block, and ignores later
    signals. Yields a list to which the signal is appended. With a `stop_file`, SIGTERM and SIGUSR1
    only create this file.

    Replaces the signal handler of torchrun's agent, which raises for every signal, even while the
    agent waits for the ranks to end.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *preemption.SIGNALS)}
    every_time = elastic._terminate_process_handler
    came: list[signal.Signals] = []

    def once(signum: int, frame: Any) -> None:
        if stop_file and signum in preemption.SIGNALS:
            stop_file.touch()
            return
        for ended in handlers:
            signal.signal(ended, signal.SIG_IGN)
        came.append(signal.Signals(signum))
        # the ranks get SIGKILL: another signal could count as a stop request
        raise SignalException("stopped", signal.SIGKILL)

    elastic._terminate_process_handler = once
    if stop_file:
        for number in preemption.SIGNALS:
            signal.signal(number, once)
        if preemption.asked():  # before
            stop_file.touch()
    try:
        yield came
    finally:
        elastic._terminate_process_handler = every_time
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_rank(
    launcher: tuple[int, int | None],
    folder: Path,
    restarts: int,
    stops: bool,
    work: Callable[..., int],
    *arguments: Any,
) -> int:
    """Runs work(*arguments) as one rank, whose process title names it in `ps`. Returns the result.

    `launcher`: its process id and start time; `folder`: the files through which launcher and ranks
    communicate; `restarts`: number of restarts so far; `stops`: see `launch`. An RFTMegaError is
    passed to the launcher, other errors are printed as a traceback.

    The kernel kills the rank when the launcher ends: a signal that the rank can handle would be a
    request to save, into a folder that another run may use by then.
    """
    # the launcher, or the server of its forks, which ends with it
    end_with_parent(os.getppid(), signal.SIGKILL)
    pid, started = launcher
    if process_start(pid) != started:  # before the line above
        os.kill(os.getpid(), signal.SIGKILL)
    # Ctrl-C reaches every process of a terminal; the launcher ends the ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if stops:
        preemption.listen()
    else:
        preemption.unlisten()
    preemption.request.file = folder / STOP
    rank = os.environ["RANK"]
    # each restart has a new agent, which would set 0
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    setproctitle(f"rftmega rank {rank}")
    try:
        return work(*arguments)
    except FAULTS as error:
        if not _left(folder, rank, str(error)):
            time.sleep(GRACE)
            sys.stderr.write(f"[rank {rank}] {error}\n")
        sys.exit(1)
    except RFTMegaError as error:
        draft = folder / rank
        draft.write_text(f"{type(error).__name__} {error.exit_code}\n{error}")
        draft.rename(folder / COMPLAINTS / rank)
        sys.exit(1)
    except Exception:
        text = traceback.format_exc()
        if not _left(folder, rank, text):
            # a collective fails within milliseconds of a peer's death, and the peer must be
            # reported as the cause
            time.sleep(GRACE)
            sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()))
        sys.exit(1)


def _left(folder: Path, rank: str, text: str) -> bool:
    """Leaves what a rank died of to the launcher, which prints it if no other rank's death was the
    cause. Returns whether the launcher wants it so.
    """
    if not (folder / TRACES).is_dir():
        return False
    (folder / TRACES / rank).write_text(text)
    return True
