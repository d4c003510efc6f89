"""Starting N processes of the same program on this machine, through torchrun's own agent."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

SAID_WHY = 2  # exit code of a rank that has printed what is wrong


def launch(processes: int, script: str | Path, arguments: Sequence[str]) -> int:
    """Runs `script` on `processes` ranks and waits; the exit code for this process. Ends all of them when one fails."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a line of NUMA advice a rank
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="local",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-u", str(script), *arguments)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode != SAID_WHY:
            end = (
                f"was killed by {signal.Signals(-first.exitcode).name}" if first.exitcode < 0 else f"exited with {first.exitcode}"
            )
            sys.stderr.write(f"error: rank {rank} (pid {first.pid}) {end}; the other ranks were ended.\n")
        return SAID_WHY if first.exitcode == SAID_WHY else 1
    except SignalException as stopped:
        sys.stderr.write(f"stopped by {signal.Signals(stopped.sigval).name}; all ranks were ended.\n")
        return 128 + stopped.sigval
    return 0
