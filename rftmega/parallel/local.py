"""Starting N processes of the same program on this machine, through torchrun's own agent."""

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

from rftmega import device
from rftmega.errors import RFTMegaError

GRACE = 2.0  # seconds


def launch(processes: int, work: Callable[..., None], *arguments: Any, preload: Sequence[str]) -> int:
    """Runs work(*arguments) on `processes` ranks and waits; the exit code for this process. Ends all when one fails.

    Where the device allows it, ranks are forked from a server that has imported the modules `preload` once, which is most
    of a start. Raises the RFTMegaError that a rank raised, whichever it was.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    DynamicRendezvousHandler._create_tcp_store_server = _store  # type: ignore[assignment, method-assign]
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a line of NUMA advice a rank
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it would say is said below
    if device.current().start_method == "forkserver":
        _start_server(preload)
    with tempfile.TemporaryDirectory() as complaints, tempfile.TemporaryDirectory() as agent_files, _one_signal() as came:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id="local",
            rdzv_backend="c10d",
            rdzv_endpoint=f"{agent_files}/rendezvous",
            rdzv_configs={"store_type": "file"},  # one of TCP would listen to other hosts, too
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            start_method=device.current().start_method,
            logs_specs=DefaultLogsSpecs(log_dir=agent_files),
        )
        try:
            elastic_launch(config, _rank)(complaints, work, *arguments)
        except ChildFailedError as error:
            if said := sorted(Path(complaints).iterdir(), key=lambda path: path.stat().st_mtime):
                raise RFTMegaError(said[0].read_text()) from None
            rank, first = error.get_first_failure()
            killed = first.exitcode < 0
            end = f"was killed by {signal.Signals(-first.exitcode).name}" if killed else f"exited with {first.exitcode}"
            sys.stderr.write(f"error: rank {rank} (pid {first.pid}) {end}; the other ranks were ended.\n")
            return 1
        except SignalException:
            sys.stderr.write(f"stopped by {came[0].name}; all ranks were ended.\n")
            return 128 + came[0]
    return 0


def _store(handler: DynamicRendezvousHandler, address: str, port: int) -> TCPStore:
    """Where the ranks meet, on loopback: torch's listens to other hosts, too. The agent keeps it, so nobody takes its port."""
    listener = socket.create_server((address, port))
    bound = listener.getsockname()[1]
    return TCPStore(address, bound, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _start_server(preload: Sequence[str]) -> None:
    """Starts the server that ranks are forked from, deaf to Ctrl-C from its first moment: it ends with this process."""
    multiprocessing.set_forkserver_preload(list(preload))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def _one_signal() -> Iterator[list[signal.Signals]]:
    """Within, the first Ctrl-C or SIGTERM (gives which) ends the ranks, and further ones don't interrupt that.

    The agent's own handler raises for each of them, also out of the code that waits for the ranks to end.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    every_time = elastic._terminate_process_handler
    came: list[signal.Signals] = []

    def once(signum: int, frame: Any) -> None:
        for ended in handlers:
            signal.signal(ended, signal.SIG_IGN)
        came.append(signal.Signals(signum))
        raise SignalException("stopped", signal.SIGTERM)  # what the ranks get: they ignore a terminal's Ctrl-C

    elastic._terminate_process_handler = once
    try:
        yield came
    finally:
        elastic._terminate_process_handler = every_time
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _rank(complaints: str, work: Callable[..., None], *arguments: Any) -> None:
    """One rank: its title names it in `ps`; what is the user's to mend goes to the launcher, anything else is a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the launcher ends the ranks
    rank = os.environ["RANK"]
    setproctitle(f"rftmega rank {rank}")
    try:
        work(*arguments)
    except RFTMegaError as error:
        draft = Path(complaints, f".{rank}")
        draft.write_text(str(error))
        draft.rename(Path(complaints, rank))
        sys.exit(1)
    except Exception:
        time.sleep(GRACE)  # a collective fails within milliseconds of a peer's death, and it is the peer that is to be named
        sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in traceback.format_exc().splitlines()))
        sys.exit(1)
