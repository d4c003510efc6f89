"""Line holds the connections of one event loop with one server."""

from typing import TYPE_CHECKING, NamedTuple

import httpx

from rftmega.rollout.servers.connection import ServerConnection

if TYPE_CHECKING:
    from rftmega.rollout.servers.server_client import ServerClient


class Line(NamedTuple):
    """Line holds the connections of one event loop with one server."""

    server: "ServerClient"
    client: httpx.AsyncClient
    connection: ServerConnection

    async def close(self) -> None:
        await self.connection.close()
        await self.client.aclose()


def line_to(server: "ServerClient") -> Line:
    """Returns a new line; nothing is opened yet."""
    limits = httpx.Limits(max_connections=None)
    timeout = httpx.Timeout(None, connect=30.0)
    # no proxy has the key
    client = httpx.AsyncClient(
        timeout=timeout, limits=limits, trust_env=False, verify=server.verified
    )
    return Line(server, client, server.connection())
