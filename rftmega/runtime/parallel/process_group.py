"""Joins and leaves the default process group, under torchrun or as a single process."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rftmega.core.errors import ConfigError
from rftmega.runtime import device
from rftmega.runtime.parallel import preemption
from rftmega.runtime.parallel.environment import whole_number
from rftmega.runtime.parallel.rendezvous import choose_interface, store

log = logging.getLogger(__name__)
# variables that vLLM's external launcher reads in a process without a launcher
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@dataclass(frozen=True, slots=True)
class World:
    """World describes the processes of a run: their number, this process's rank among them and on
    its host, and its device.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def launched_size() -> int:
    """Returns the number of processes that the launcher started (1 without a launcher).

    Works before torch.distributed is initialised.
    """
    return whole_number("WORLD_SIZE", 1)


def current() -> World:
    """Returns the World of the process group that this process has joined."""
    return World(
        dist.get_rank(),
        dist.get_world_size(),
        whole_number("LOCAL_RANK", 0),
        whole_number("LOCAL_WORLD_SIZE", dist.get_world_size()),
        device.current().here(),
    )


def check_launcher() -> None:
    """Raises ConfigError if srun started several tasks without torchrun: each would act as the
    whole run.
    """
    if "WORLD_SIZE" not in os.environ and whole_number("SLURM_STEP_NUM_TASKS", 1) > 1:
        raise ConfigError(
            "srun started several tasks that know nothing of each other. Start one torchrun a node: srun torchrun ..."
        )


@contextmanager
def start(*, timeout: timedelta = timedelta(minutes=30), beside: str = "") -> Iterator[World]:
    """Initialises torch.distributed within a `with` block, and shuts it down after a clean end.

    Reads torchrun's environment variables; without them this process is a world of size 1.
    `timeout`: of collectives. Logs a description of the device, followed by the text `beside`.
    """
    backend = device.current()
    alone = "MASTER_ADDR" not in os.environ
    rank, size = 0 if alone else whole_number("RANK", 0), launched_size()
    local_rank = whole_number("LOCAL_RANK", 0)
    local_size = whole_number("LOCAL_WORLD_SIZE", 1)
    if size > 1 and alone:
        raise ConfigError(
            "WORLD_SIZE is set but MASTER_ADDR is not. Launch with torchrun, or unset WORLD_SIZE."
        )
    # Megatron overlaps TP communication by kernel order
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    where = backend.select(local_rank, local_size)
    on_this_host = alone or size == local_size
    choose_interface("" if alone else os.environ["MASTER_ADDR"], alone=on_this_host)
    before = {name: os.environ.get(name) for name in ALONE}
    if alone:
        os.environ |= ALONE
    meeting = dist.HashStore() if alone else store(rank, size, timeout)
    dist.init_process_group(
        backend.collectives, store=meeting, rank=rank, world_size=size, timeout=timeout
    )
    preemption.meet(None if alone else meeting)
    if rank == 0:
        told = "; ".join(filter(None, (backend.described(), beside)))
        log.info("device: %s (%s): %s", backend.type, backend.reason, told)
        log.info("collectives: %s, processes: %d", backend.collectives, size)
    try:
        yield World(rank, size, local_rank, local_size, where)
        if dist.is_initialized():
            dist.barrier()
        _leave()
    except BaseException:
        # Other processes may never arrive, and waiting would hide the error. A world of size 1 has
        # none to wait for, and its process did not end while NCCL's groups existed.
        if size == 1:
            _leave()
        raise
    finally:
        preemption.meet(None)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


@contextmanager
def undone(world: World, undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if the `with` block fails in a world of size 1, whose process may start another
    run.

    In a larger world `undo` is not called: each process is about to end, and `undo` might wait for
    other processes.
    """
    try:
        yield
    except BaseException:
        if world.size == 1:
            undo()
        raise


def _leave() -> None:
    """Destroys the process groups, unless vLLM's shutdown has destroyed them already."""
    if dist.is_initialized():
        dist.destroy_process_group()
