"""Sets the number of threads with which torch computes on a host's cores."""

import os

import torch

VARIABLE = "OMP_NUM_THREADS"
DEFAULT = "RFTMEGA_DEFAULT_THREADS"  # the value of VARIABLE that the launcher chose, not the user


def share(processes: int) -> int:
    """Returns the number of threads for one of `processes` processes of this host: OMP_NUM_THREADS
    if the user set it, otherwise its share of the cores.
    """
    given = os.environ.get(VARIABLE, "")
    first = given.partition(",")[0]  # the others are of nested parallelism
    if given != os.environ.get(DEFAULT) and first.isdigit() and int(first):
        return int(first)
    return max(1, len(os.sched_getaffinity(0)) // processes)


def limit_threads(processes: int) -> None:
    """Lets torch compute with `share(processes)` threads: with more threads than cores, threads
    would only wait for each other.
    """
    torch.set_num_threads(share(processes))


def choose_default(processes: int) -> None:
    """Sets OMP_NUM_THREADS for libraries of the processes that will be started, unless the user
    has set it.
    """
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = os.environ[DEFAULT] = str(share(processes))
