"""Interprets a server's reply to the request with which a run claims it for exclusive use."""

from contextlib import suppress
from typing import Any

from rftmega.core.errors import EngineError
from rftmega.rollout.servers.protocol.http_reply import HTTPReply
from rftmega.rollout.servers.vllm import ownership


class ServerTaken(EngineError):
    """ServerTaken is raised if another run holds the lease of a server."""

    def __init__(self, address: str, owner: str, heard: float):
        """Composes the message. `address`: the server's URL; `owner`: description of the run that
        holds the server; `heard`: seconds since that run last renewed its lease.
        """
        self.heard = heard
        super().__init__(
            f"The server at {address} belongs to another run, {owner}, which was heard of {heard:.0f} s ago. Give this run "
            "servers of its own, or end that one: a server is free when its run ends, or "
            f"{ownership.LEASE_SECONDS:.0f} s after it was last heard of."
        )


def refuse_taken(address: str, reply: HTTPReply) -> None:
    """Raises ServerTaken if `reply`, of the server at `address`, has the status that means that
    another run holds the server.
    """
    if reply.status != ownership.TAKEN:
        return
    taken = dict[str, Any]()
    with suppress(ValueError):
        taken = reply.read()
    heard = taken.get("heard")
    age = float(heard) if isinstance(heard, int | float) else 0.0
    raise ServerTaken(address, str(taken.get("owner"))[:300], age)
