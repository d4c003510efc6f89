"""Runs a function on N ranks and brings their results, or the first failure, back to pytest.

Ranks talk over gloo, or over NCCL where this process computes on CUDA. On a CPU they are forked
from a server process that has imported torch and Megatron once, so that a fresh set costs a
fraction of a second. They meet in a file, so that no port is needed. Bodies are module-level
functions: body(world, *args).
"""

import functools
import importlib
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

CONTEXT = mp.get_context("forkserver")
# what ranks have imported before they are forked
LOCAL, TRANSFORMER_ENGINE = "tests.preloaded", "tests.preloaded_te"
VLLM = "tests.preloaded_command"  # for a file of tests that says `PRELOADED = VLLM`
# Not multiprocessing's own server: its imports are those that whoever asked last has chosen.
SERVERS: dict[str, forkserver.ForkServer] = {}


class RankFailure(AssertionError):
    """A rank raised or died; the message names it."""


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 180.0,
    preloaded: str = "",
) -> list[Any]:
    """body(world, *args) on every rank; results in the order of ranks. Leaves no process behind,
    whatever happens.

    With `preloaded` TRANSFORMER_ENGINE, Megatron found the stub of it; without, it is what the file of
    `body` says in PRELOADED, or LOCAL.
    """
    from rftmega.runtime import device

    preloaded = preloaded or _preloaded_of(body.__module__)

    on_cpu = device.current().type == "cpu"
    if world_size == 1 and not on_cpu:
        return [alone(body, *args)]  # a device's start takes longer than its test
    # A forked process can't use CUDA once its parent has looked for it.
    context: Any = CONTEXT if on_cpu else mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as meeting_place:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(
                target=_rank,
                args=(
                    rank,
                    world_size,
                    meeting_place,
                    pipes[rank][1],
                    preloaded,
                    dict(os.environ),
                    body,
                    args,
                ),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        try:
            start_in(ranks, preloaded)
            for _, sender in pipes:
                sender.close()
            return _collect([receiver for receiver, _ in pipes], time.monotonic() + timeout)
        finally:
            for process in ranks:
                if process.pid:
                    process.join(timeout=0.5)
                    if process.is_alive():
                        with suppress(ProcessLookupError):  # it ended meanwhile
                            os.kill(process.pid, signal.SIGKILL)
                    process.join()


def alone(body: Callable[..., Any], *args: Any) -> Any:
    """body(world, *args) in this process, as a world of one; leaves no group behind."""
    from megatron.core import parallel_state

    from rftmega.runtime.parallel import process_group

    with process_group.start() as world:
        try:
            return body(world, *args)
        finally:
            parallel_state.destroy_model_parallel()


def server_of(preloaded: str) -> forkserver.ForkServer:
    """The server that has imported `preloaded`, which starts with the first process that it forks."""
    if preloaded not in SERVERS:
        SERVERS[preloaded] = forkserver.ForkServer()
        SERVERS[preloaded].set_forkserver_preload([preloaded])
    return SERVERS[preloaded]


def start_in(ranks: list[Any], preloaded: str) -> None:
    """Start processes in the server that has imported `preloaded`; multiprocessing knows only one."""
    usual = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server_of(preloaded).connect_to_new_process
    try:
        for process in ranks:
            process.start()
    finally:
        forkserver.connect_to_new_process = usual


def _preloaded_of(module: str) -> str:
    return getattr(importlib.import_module(module), "PRELOADED", LOCAL)


def _collect(receivers: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(enumerate(receivers))
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(f"ranks {sorted(waiting)} did not answer in time")
        for rank in [r for r, receiver in waiting.items() if receiver in ready]:
            try:
                ok, value = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                raise RankFailure(f"rank {rank} died") from None
            if not ok:
                raise RankFailure(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _rank(
    rank: int,
    world_size: int,
    meeting_place: str,
    sender: Connection,
    preloaded: str,
    environ: dict[str, str],
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ |= environ  # the server has that of the first test
    importlib.import_module(preloaded)  # the server says nothing of what it failed to import

    import torch
    import torch.distributed as dist

    from rftmega.runtime import device
    from rftmega.runtime.parallel.process_group import World

    backend = device.current()
    where = backend.select(rank, world_size)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    try:
        meeting = f"file://{meeting_place}/store"
        dist.init_process_group(
            backend.collectives, init_method=meeting, rank=rank, world_size=world_size
        )
        value = body(World(rank, world_size, rank, world_size, where), *args)
        # by value: a tensor in shared memory would outlive its rank
        sender.send_bytes(pickle.dumps((True, value)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # whatever it is, it belongs to pytest
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
    sender.close()


def on_ranks(world_size: int) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    """Decorator: the body is a test that runs on `world_size` ranks and takes the world as its only
    argument.
    """

    def decorate(body: Callable[..., Any]) -> Callable[[], None]:
        def test() -> None:
            run_ranks(
                world_size,
                functools.partial(_call, body.__module__, body.__qualname__),
                preloaded=_preloaded_of(body.__module__),
            )

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def _call(module: str, name: str, world: Any) -> Any:
    return getattr(importlib.import_module(module), name).body(world)
