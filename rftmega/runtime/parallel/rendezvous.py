"""Provides the rendezvous store, and restricts collectives to one network interface of each host."""

import errno
import ipaddress
import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

from rftmega.core.errors import NodeError, NodeFault
from rftmega.runtime.parallel.environment import whole_number

INTERFACE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Returns the store at MASTER_ADDR:MASTER_PORT through which torch.distributed connects the
    processes.

    Rank 0 serves the store, at that address only, unless torchrun's agent does. The agent's store
    keeps entries from before a restart, so each attempt has its own prefix. Raises NodeError if the
    address is not rank 0's, or is one that other hosts can't reach. Raises NodeFault if another
    process uses the port: starting the run again may help, since the next start takes another port
    (tools/run.sbatch) or finds this one free.
    """
    name, port = os.environ["MASTER_ADDR"], whole_number("MASTER_PORT")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(
            f"attempt {attempt}", dist.TCPStore(name, port, size, False, timeout)
        )
    listener = None if rank else _listener(name, port, size)
    fd = None if listener is None else listener.detach()
    return dist.TCPStore(
        name, port, size, rank == 0, timeout, wait_for_workers=False, master_listen_fd=fd
    )


def _listener(name: str, port: int, size: int) -> socket.socket:
    try:
        family, _, _, _, where = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        alone = size == whole_number("LOCAL_WORLD_SIZE", 1)
        if (
            ipaddress.ip_address(where[0]).is_loopback
            and where[0] != name
            and name != "localhost"
            and not alone
        ):
            raise NodeError(
                f"MASTER_ADDR={name} is {where[0]} on its own host, which no other host can reach. Set MASTER_ADDR to its "
                "address in the cluster's network."
            )
        return socket.create_server(where[:2], family=family, backlog=max(128, size))
    except OSError as error:
        raise (NodeFault if error.errno == errno.EADDRINUSE else NodeError)(
            f"rank 0 on {socket.gethostname()} can't listen at MASTER_ADDR={name}, MASTER_PORT={port}: {error}. Give an "
            "address of this host and a port that is free."
        ) from error


def choose_interface(name: str, *, alone: bool) -> None:
    """Restricts collectives to the network interface by which this host reaches host `name`, or to
    loopback if `alone` (all processes are on this host), unless the user set an interface.

    If no interface can be determined, the libraries choose.
    """
    if chosen := interface_towards("127.0.0.1" if alone else name):
        for variable in INTERFACE:
            os.environ.setdefault(variable, chosen)


def interface_towards(name: str) -> str | None:
    """Returns the name of the network interface, e.g. eth0, by which this host reaches host `name`;
    None if there is no route.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(where)
            own = probe.getsockname()[0]
    except OSError:
        return None
    addresses = psutil.net_if_addrs().items()
    return next(
        (
            found
            for found, held in addresses
            if any(own == address.address.split("%")[0] for address in held)
        ),
        None,
    )
