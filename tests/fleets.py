"""Fleets of stand-ins for servers."""

from typing import Any

from rftmega.fleet.fleet import FleetMember
from rftmega.fleet.server_engine import ServerEngine


def set_servers(engine: ServerEngine, *servers: Any) -> None:
    """Makes these the engine's servers, which have the newest weights."""
    engine.fleet.members = [FleetMember(number, server) for number, server in enumerate(servers)]
    for member in engine.fleet.members:
        member.health.came()
        member.health.landed()
