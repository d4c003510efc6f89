"""Process group of the trainer's processes and the workers of one remote engine."""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.core.errors import EngineFault


class Meeting:
    """Meeting is the rendezvous store (a TCPStore) at which processes of several programs find each
    other.

    Any host that reaches the store's address can read and write it: keep it on a private network.
    """

    def __init__(self, host: str, *, seconds: float):
        """Opens the store in this process, at a free port of the address `host` only. `seconds`:
        time limit of a store operation.
        """
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            listening.bind((host, 0))
            listening.listen()
            self.host, self.port = host, int(listening.getsockname()[1])
            self.store = dist.TCPStore(
                host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
                master_listen_fd=listening.detach(),
            )


def visited(host: str, port: int, *, seconds: float) -> dist.Store:
    """Connects to the store of a Meeting in another process, and returns the client.

    Raises EngineFault if the store does not respond.
    """
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
    except dist.DistError as error:
        raise EngineFault(f"Nobody answers at {host}:{port}: {error}") from error


class TransferGroup:
    """TransferGroup is a process group in addition to torch's default group: the trainer's
    processes have the lowest ranks, an engine's workers the higher ones.

    Connections are opened at the first send, so only pairs that exchange messages are connected.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        *,
        rank: int,
        size: int,
        device: torch.device,
        host: str,
        seconds: float,
    ):
        """`store`: the rendezvous store; `name`: name of the group; `rank`, `size`: of this process
        and of the group; `host`: the address at which the other processes reach this process.
        `seconds`: time limit of one message, and for the other processes to join.

        Raises EngineFault if the processes do not join in time.
        """
        self._limit = timedelta(seconds=seconds)
        own = dist.PrefixStore(name, store)
        try:
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._limit
                self._group: Any = dist.ProcessGroupNCCL(own, rank, size, options)
            else:
                kind: Any = dist.ProcessGroupGloo
                gloo = kind._Options()
                place = kind.create_device(hostname=host, lazy_init=True)
                gloo._devices = [place]
                gloo._timeout = self._limit
                self._group = kind(own, rank, size, gloo)
        except (dist.DistError, RuntimeError) as error:
            raise EngineFault(f"The processes of {name} do not find each other: {error}") from error

    def send(self, message: Tensor, target: int) -> "InFlight":
        """Starts sending the message [bytes] to process `target`; the message must not change until
        the returned InFlight has ended.
        """
        return InFlight(self._begun(self._group.send, message, target), self._limit)

    def receive(self, message: Tensor, source: int) -> "InFlight":
        """Starts receiving from process `source` into the message [bytes]."""
        return InFlight(self._begun(self._group.recv, message, source), self._limit)

    def close(self) -> None:
        """Closes the connections; messages in transit fail at the other processes."""
        self._group.abort()

    def _begun(self, begin: Any, message: Tensor, other: int) -> Any:
        try:
            return begin([message], other, 0)
        except (dist.DistError, RuntimeError) as error:
            raise EngineFault(f"Process {other} can't be reached: {error}") from error


class InFlight:
    """InFlight is a message that is being sent or received."""

    def __init__(self, work: Any, limit: timedelta):
        self._work, self._limit = work, limit

    def wait(self) -> None:
        """Waits until the message is sent or received. Raises EngineFault if the other process is
        gone or the time limit has passed.
        """
        try:
            self._work.wait(self._limit)
        except (dist.DistError, RuntimeError) as error:
            raise EngineFault(f"A message broke off: {error}") from error


def wait_all(messages: Sequence[InFlight]) -> None:
    for message in messages:
        message.wait()
