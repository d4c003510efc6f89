"""Tests whether nodes of an elastic run reach each other over the network that their ranks use.

A lease in a shared folder says that a node lives, not that its network works: without this test, a
node that is cut off would be taken into every new round.
"""

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from rftmega.run.elastic.membership import Member

NEIGHBOURS = 4  # nodes that each node connects to
PATIENCE = 2.0  # most seconds of one attempt
LENGTH = 64  # bytes read of a reply


class Signs:
    """Signs answers other nodes' connections with this node's token, and connects to them."""

    def __init__(self, address: str, token: str, *, lease: float):
        """Listens at `address`, at a free port. `lease`: seconds without a connection after which a
        node counts as unreachable.

        Raises OSError if `address` is not this host's.
        """
        self._token, self._lease = token, lease
        self._listener = socket.create_server((address, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._reached: dict[str, float] = {}  # name and token -> time of the last connection
        self._over = threading.Event()
        self._neighbours: Sequence[Member] = ()
        for work in (self._reply, self._connect):
            threading.Thread(target=work, name="signs", daemon=True).start()

    def watch(self, members: Sequence[Member], own: str) -> tuple[str, ...]:
        """Sets the nodes that train together, this one (`own`) among them, and returns the names of
        those that could not be reached for as long as a lease.
        """
        names = [member.name for member in members]
        if own not in names:
            self._neighbours = ()
            return ()
        place = names.index(own)
        following = [*members[place + 1 :], *members[:place]]
        chosen = following[:NEIGHBOURS]
        now = time.monotonic()
        known = {_key(member) for member in chosen}
        self._reached = {key: at for key, at in self._reached.items() if key in known}
        for member in chosen:  # a node that has just come has not been tried yet
            self._reached.setdefault(_key(member), now)
        self._neighbours = chosen
        return tuple(
            member.name for member in chosen if now - self._reached[_key(member)] > self._lease
        )

    def close(self) -> None:
        self._over.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        self._listener.close()

    def _reply(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(PATIENCE)
                    connection.sendall(self._token.encode())
            except OSError:  # closed, or the other has gone
                if self._over.wait(0.05):
                    return

    def _connect(self) -> None:
        while not self._over.wait(min(1.0, self._lease / 5)):
            for member in list(self._neighbours):
                if reached(member, seconds=min(PATIENCE, self._lease / 10)):
                    self._reached[_key(member)] = time.monotonic()


def reached(member: Member, *, seconds: float = PATIENCE) -> bool:
    """Returns whether the node's supervisor answers at its address within `seconds`."""
    try:
        with socket.create_connection(
            (member.address, member.sign_port), timeout=seconds
        ) as connection:
            return connection.recv(LENGTH).decode(errors="replace") == member.token
    except OSError:
        return False


def _key(member: Member) -> str:
    return f"{member.name} {member.token}"
