"""Runs vLLM servers of a run on this host, for a trainer on another host.

    export RFTMEGA_SERVER_KEY=...       # the same for servers and trainer
    rftmega serve CONFIG [option=value ...] --listen 10.0.0.2 --port 8100 --servers 4
    rftmega serve CONFIG [option=value ...] --listen 10.0.0.2 --server-list /shared/servers.txt

CONFIG is the config file of rftmega train. The trainer finds the servers by rollout.addresses (fixed
ports: --port and the following ones), or by rollout.server_list, a file on a shared file system
that contains the address of each server from the time it is ready until it ends. So servers can
join and leave during a run.

A server that ends is restarted. SIGTERM or Ctrl-C ends all servers. Servers have random weights
until the run's first push.
"""

import argparse
import fcntl
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftmega import config as configuration
from rftmega.config import RunConfig
from rftmega.core.errors import ConfigError, EngineFault, exit_code_of
from rftmega.run.option_parser import OptionParser

if TYPE_CHECKING:
    from rftmega.rollout.servers.server import Server

LOOK_SECONDS = 0.5  # between two checks of whether a server has ended
log = logging.getLogger(__name__)


class Renamed(argparse.Action):
    """Renamed is the argparse action of --roster, the former name of --server-list: it ends the
    program with an error that names the new option.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        parser.error("--roster is now --server-list")


def main(given: list[str] | None = None) -> int:
    parser = OptionParser(
        description=__doc__,
        usage="%(prog)s CONFIG [option=value ...] --listen ADDRESS [...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="option=value", default=[], help="as of rftmega train"
    )
    parser.add_argument(
        "--listen",
        required=True,
        metavar="ADDRESS",
        help="address of this host that the trainer reaches",
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="of the first server (a free one)"
    )
    parser.add_argument("--servers", type=int, default=1, metavar="N", help="to run here (1)")
    parser.add_argument("--server-list", metavar="FILE", help="to enter the servers' addresses in")
    parser.add_argument("--roster", action=Renamed, help=argparse.SUPPRESS)
    parser.add_argument(
        "--tls", nargs=2, metavar=("CERTIFICATE", "KEY"), help="PEM files: speak https"
    )
    parser.add_argument(
        "--logs", default="servers", metavar="FOLDER", help="of the servers (servers)"
    )
    return exit_code_of(serve, parser.parse_intermixed_args(given))


def serve(chosen: argparse.Namespace) -> int:
    """Runs the servers until SIGTERM or SIGINT. Returns the exit code. `chosen`: the parsed command
    line.
    """
    from rftmega.rollout.servers.vllm import auth

    try:
        key = auth.given_key()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    config = configuration.load(chosen.config, chosen.overrides)
    if config.rollout.transport not in ("network", "disk"):
        raise ConfigError(
            f"rollout.transport={config.rollout.transport} is not for servers of `rftmega serve`. Set it to network, or to disk, "
            "for the trainer too."
        )
    for file in chosen.tls or ():
        if not Path(file).is_file():
            raise ConfigError(f"--tls {file} is no file. Give a certificate and its key, as PEM.")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm asks a whole job to save
    Servers(config, chosen, key).run(ending)
    return 0


class Servers:
    """Servers keeps the servers of one host running."""

    def __init__(self, config: RunConfig, chosen: argparse.Namespace, key: str):
        from rftmega.rollout.servers.server_options import (
            arguments_of_run,
            devices_of,
            environment_of,
        )
        from rftmega.run.placement.engines import unquantised
        from rftmega.runtime import device

        device.current()
        self._arguments = arguments_of_run(config, unquantised=unquantised(config))
        tensor = config.rollout.tensor
        self._environments = [
            environment_of(key, speculates=config.rollout.speculative.draft_tokens > 0)
            | devices_of(number * tensor, config.rollout)
            for number in range(chosen.servers)
        ]
        self._chosen = chosen
        self._server_list = Path(chosen.server_list) if chosen.server_list else None

    def run(self, ending: threading.Event) -> None:
        """Starts the servers, restarts each server that ends, and ends all servers once `ending` is
        set.

        Raises EngineError for a failure that a restart would only repeat.
        """
        servers = [self._started(number) for number in range(self._chosen.servers)]
        known = set[int]()  # servers that have become ready
        try:
            while not ending.wait(LOOK_SECONDS):
                for number, server in enumerate(servers):
                    if number not in known and server.there():
                        known.add(number)
                        self._enter(server.address)
                        log.info("server %d answers at %s", number, server.address)
                    if not server.alive:
                        self._strike(server.address)
                        if number not in known:
                            with suppress(EngineFault):  # which may not occur again
                                server.wait()
                        known.discard(number)
                        log.warning(
                            "server %d has ended, and starts again: see %s", number, server.log
                        )
                        server.close()
                        servers[number] = self._started(number)
        finally:
            for server in servers:
                self._strike(server.address)
                server.close()

    def _started(self, number: int) -> "Server":
        from rftmega.rollout.servers.server import Server

        chosen = self._chosen
        return Server(
            self._arguments,
            self._environments[number],
            Path(chosen.logs) / f"server-{chosen.listen}-{number}.log",
            host=chosen.listen,
            port=chosen.port and chosen.port + number,
            tls=chosen.tls,
        )

    def _enter(self, address: str) -> None:
        self._rewrite([address], [])

    def _strike(self, address: str) -> None:
        self._rewrite([], [address])

    def _rewrite(self, new: Sequence[str], gone: Sequence[str]) -> None:
        """Adds the addresses `new` to the server list and removes the addresses `gone`, under a
        lock, since other hosts change the same file.
        """
        if self._server_list is None:
            return
        self._server_list.parent.mkdir(parents=True, exist_ok=True)
        with self._server_list.with_name(f"{self._server_list.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            odd = "surrogateescape"  # keeps bytes that are not UTF-8
            before = self._server_list.read_text(errors=odd) if self._server_list.exists() else ""
            kept = [line for line in before.splitlines() if line not in (*new, *gone)]
            draft = self._server_list.with_name(f"{self._server_list.name}.incomplete")
            draft.write_text("".join(f"{line}\n" for line in [*kept, *new]), errors=odd)
            os.replace(draft, self._server_list)  # atomic for readers


if __name__ == "__main__":
    sys.exit(main())
