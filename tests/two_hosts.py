"""Two hosts on one machine: a network namespace beside the machine's own, joined by a veth pair."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

MAY = os.geteuid() == 0 and shutil.which("ip") is not None


class TwoHosts(NamedTuple):
    """TwoHosts are `here`, the machine's own namespace, and `there`."""

    name: str
    here: str  # address of this host
    there: str

    def command(self, *command: str) -> list[str]:
        """Returns a command that runs there."""
        return ["ip", "netns", "exec", self.name, *command]

    def cut(self) -> None:
        _ip("link", "set", f"{self.name}-a", "down")

    def join(self) -> None:
        _ip("link", "set", f"{self.name}-a", "up")

    def sent(self) -> int:
        """Returns how many bytes went there until now."""
        counters = Path(f"/sys/class/net/{self.name}-a/statistics/tx_bytes")
        return int(counters.read_text())

    def limit(self, megabits: int) -> None:
        """Limits what is sent there to so many megabits a second."""
        shape = ["tbf", "rate", f"{megabits}mbit", "burst", "128kbit", "latency", "200ms"]
        subprocess.run(
            ["tc", "qdisc", "replace", "dev", f"{self.name}-a", "root", *shape], check=True
        )


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Makes the other host, and takes it away with all that runs there."""
    number = os.getpid() % 200 + 20
    hosts = TwoHosts(f"rft{os.getpid()}", f"10.213.{number}.1", f"10.213.{number}.2")
    _ip("netns", "add", hosts.name)
    try:
        pair = [f"{hosts.name}-a", f"{hosts.name}-b"]
        _ip("link", "add", pair[0], "type", "veth", "peer", "name", pair[1], "netns", hosts.name)
        _ip("addr", "add", f"{hosts.here}/24", "dev", pair[0])
        _ip("link", "set", pair[0], "up")
        inside = ("netns", "exec", hosts.name, "ip")
        _ip(*inside, "addr", "add", f"{hosts.there}/24", "dev", pair[1])
        _ip(*inside, "link", "set", pair[1], "up")
        _ip(*inside, "link", "set", "lo", "up")
        yield hosts
    finally:
        _ip("netns", "del", hosts.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
