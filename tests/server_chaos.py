"""The fault table of servers elsewhere: what is done to them while groups are rolled out, and what
becomes of each group.

`python -m tests.server_chaos` runs every case and prints a row each. A case is two servers of
tests/scripted_server.py, each behind a proxy that can be told to misbehave (tests/tcp_proxy.py), and
the project's own fleet, client and runner. An answer is a function of its seed, so that one that is
lost, made twice or taken for another's shows.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch

from benchmarks import machine
from rftmega.config import RolloutConfig
from rftmega.core.errors import EngineError, EngineFault, RFTMegaError
from rftmega.core.interfaces import RolloutGroup
from rftmega.core.types import Prompt, Sampling
from rftmega.environments import single_turn
from rftmega.rollout.pool.rollout_runner import Begun, RolloutRunner
from rftmega.rollout.servers import health, server_client, server_group_client
from rftmega.rollout.servers.server_engine import ServerEngine
from rftmega.rollout.servers.server_group_client import ServerGroupClient
from rftmega.rollout.servers.vllm import auth
from rftmega.runtime.parallel.process_group import World
from tests.rollouts import NEVER, save_scripted
from tests.tcp_proxy import TcpProxy

KEY = "the key of the run"
FIRST, SECOND = 16, 6  # groups before and after the second push
STRUCK_AFTER = 4  # groups that have ended


class ScriptedServer:
    """ScriptedServer is a process of tests/scripted_server.py at a port that it keeps."""

    def __init__(self, folder: Path, *options: str, key: str = KEY):
        self.folder, self.options, self.key = folder, options, key
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, str(Path(__file__).with_name("scripted_server.py"))]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *self.options]
        environment = os.environ | {auth.KEY: self.key, "PYTHONPATH": os.pathsep.join(sys.path)}
        with (self.folder / f"server-{self.port}.log").open("a") as said:
            self.process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        for _ in range(600):
            try:
                headers = auth.headers(self.key)
                httpx.get(f"http://127.0.0.1:{self.port}/health", headers=headers, timeout=5)
            except httpx.TransportError:
                time.sleep(0.05)
            else:
                return self.process
        raise AssertionError("a scripted server did not come up")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Stage:
    """Stage is a trainer's first process with two servers elsewhere."""

    def __init__(self, folder: Path, options: list[str], **rollout: Any):
        os.environ[auth.KEY] = KEY
        plain = ["--vllm", _vllm(), "--pause", "0.02"]
        self.folder = folder
        self.servers = [ScriptedServer(folder, *plain), ScriptedServer(folder, *plain, *options)]
        self.proxies = [TcpProxy(("127.0.0.1", server.port)) for server in self.servers]
        self.server_list = folder / "servers.txt"
        self.server_list.write_text("")
        config = RolloutConfig(
            addresses=[proxy.address for proxy in self.proxies],
            server_list=str(self.server_list),
            transport="network",
            max_batch=4,
            deadline_seconds=3.0,
            **rollout,
        )
        world = World(0, 1, 0, 1, torch.device("cpu"))
        save_scripted(folder)
        self.engine = ServerEngine(
            folder, config, world, dtype="float32", stop_ids=[NEVER], logs=folder
        )
        self.missed: list[str] = []
        self.runner = RolloutRunner(
            ServerGroupClient(self.engine),
            single_turn.SingleTurnEnvironment(),
            row_tokens=64,
            repeats=0,
            most_running=100,
            loop=asyncio.new_event_loop(),
        )

    def push(self, version: int) -> list[str]:
        """Gives weights of no bytes to those that take them, and returns their names."""
        engine, landed = self.engine, []
        engine.version = None
        for waiting in engine.waiting():
            try:
                engine.join(waiting.name, {})
                engine.receive(waiting.name, {"version": version})
                engine.newest = version
                engine.land(waiting.name, version)
            except EngineError as error:
                engine.miss(waiting.name, error)
                self.missed.append(waiting.name)
            else:
                landed.append(waiting.name)
        engine.version = version
        engine.pushed()
        return landed

    def begin(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            group = RolloutGroup(
                number, Prompt((5, 10 + number), task=number), (2 * number, 2 * number + 1)
            )
            self.runner.begin(Begun(group, Sampling(1.0), None))

    def wait(self, count: int, seconds: float = 40.0) -> None:
        end = time.monotonic() + seconds
        there = self.runner.wait(lambda ended: len(ended) >= count, lambda: time.monotonic() > end)
        assert there, f"{len(self.runner.ended())} of {count} groups ended in {seconds:g} s"

    def states(self) -> list[str]:
        return [str(member.state) for member in self.engine.server_group.members]

    def close(self) -> None:
        self.runner.close()
        for server in self.servers:
            server.signal(signal.SIGCONT)
            server.close()
        self.engine.close()
        for proxy in self.proxies:
            proxy.close()


def _vllm() -> str:
    from vllm import __version__

    return str(__version__)


class Fault(NamedTuple):
    """Fault is a row of the table."""

    name: str
    strike: Callable[[Stage], None]  # while the first groups run
    states: tuple[str, ...] | None = None  # of the servers at the end; None: whatever they are
    before_push: Callable[[Stage], None] = lambda stage: None
    options: tuple[str, ...] = ()  # of the second server
    missed: int = 0  # pushes that a server did not get


def killed(stage: Stage) -> None:
    stage.servers[1].close()


def killed_and_started_by_its_owner(stage: Stage) -> None:
    stage.servers[1].close()
    stage.servers[1].start()


def stopped(stage: Stage) -> None:
    stage.servers[1].signal(signal.SIGSTOP)


def goes_on(stage: Stage) -> None:
    stage.servers[1].signal(signal.SIGCONT)


def nothing(stage: Stage) -> None: ...


def unreachable_a_while(stage: Stage) -> None:
    stage.proxies[1].down()
    time.sleep(0.8)
    stage.proxies[1].up()


def cut_off(stage: Stage) -> None:
    stage.proxies[1].stuck = True


def connected_again(stage: Stage) -> None:
    stage.proxies[1].stuck = False


def delayed(stage: Stage) -> None:
    stage.proxies[1].delay = 0.1


def joined(stage: Stage, **given: Any) -> None:
    server = ScriptedServer(stage.folder, "--pause", "0.02", *given.pop("options", ()), **given)
    stage.servers.append(server)
    stage.server_list.write_text(f"http://127.0.0.1:{server.port}\n")


def joined_and_fits(stage: Stage) -> None:
    joined(stage, options=("--vllm", _vllm()))


def left(stage: Stage) -> None:
    """The server list's server comes with the second push and goes with the third."""
    joined_and_fits(stage)
    stage.push(0)
    stage.server_list.write_text("")


def all_killed_and_started(stage: Stage) -> None:
    for server in stage.servers:
        server.close()
        server.start()
    pushed_to_all(stage, 0)


def pushed_to_all(stage: Stage, version: int) -> None:
    """Pushes until all have it: one that did not answer is looked for again only after a while."""
    for _ in range(40):
        with suppress(EngineFault):
            if len(stage.push(version)) == len(stage.proxies):
                return
        time.sleep(0.2)
    raise AssertionError(f"the servers do not come back: {stage.states()}")


def half_written_server_list(stage: Stage) -> None:
    stage.server_list.write_text("# servers of this run\n\n")


GONE = "suspect or dead"
BOTH = ("healthy", "healthy")
FAULTS = [
    Fault("nothing", nothing, BOTH),
    Fault("a server is killed", killed, ("healthy", GONE)),
    Fault(
        "a server is killed, and started again by its owner",
        killed_and_started_by_its_owner,
        BOTH,
        lambda stage: pushed_to_all(stage, 0),
    ),
    Fault("a server hangs (SIGSTOP)", stopped, ("healthy", GONE)),
    Fault("a server hangs, and goes on before the next push", stopped, BOTH, goes_on),
    Fault("all connections of a server are cut", lambda s: s.proxies[1].cut(), BOTH),
    Fault("all connections of a server are reset", lambda s: s.proxies[1].cut(reset=True), BOTH),
    Fault("a server refuses connections for 0.8 s", unreachable_a_while, BOTH),
    Fault("a host is cut off, nothing is closed", cut_off, ("healthy", GONE)),
    Fault("a host is cut off, and comes back before the next push", cut_off, BOTH, connected_again),
    Fault("0.1 s are added to each message", delayed, BOTH),
    Fault("a server is 20 times slower", nothing, BOTH, options=("--pause", "0.4")),
    Fault(
        "a server says that it has other weights than it was given",
        nothing,
        None,
        options=("--version", "17"),
    ),
    Fault(
        "a server hangs when weights come",
        nothing,
        None,
        options=("--hang", "update_weights"),
        missed=1,
    ),
    Fault(
        "a server hangs when it is to stop for weights", nothing, None, options=("--hang", "pause")
    ),
    Fault(
        "a server hangs when it is to answer under new weights",
        nothing,
        None,
        options=("--hang", "resume"),
        missed=1,
    ),
    Fault("a server joins by the server list", joined_and_fits, (*BOTH, "healthy")),
    Fault("a server joins, and leaves again", left, BOTH),
    Fault(
        "a server of another version of vLLM joins",
        lambda s: joined(s, options=("--vllm", "0.0.1")),
        (*BOTH, "dead"),
    ),
    Fault(
        "a server with another key joins",
        lambda s: joined(s, options=("--vllm", _vllm()), key="another"),
        (*BOTH, "dead"),
    ),
    Fault("the server list has comments and empty lines", half_written_server_list, BOTH),
    Fault("all servers are killed, and started by their owner", all_killed_and_started, BOTH),
]


@contextmanager
def quick() -> Iterator[None]:
    """Shortens what is waited for."""
    kept = [
        (server_client, "CONTROL_SECONDS", 1.0),
        (server_client, "LONG_SECONDS", 1.0),
        (server_client, "PROBE_SECONDS", 1.0),
        (health, "FIRST_WAIT", 0.2),
        (server_group_client, "WATCH_SECONDS", 0.1),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in kept]
    for module, name, value in kept:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def happened(fault: Fault, folder: Path) -> dict[str, Any]:
    """Runs a case. Returns what became of it; raises AssertionError where something was lost."""
    with quick():
        stage = Stage(folder, list(fault.options))
        begin = time.monotonic()
        try:
            stage.push(0)
            stage.begin(0, FIRST)
            stage.wait(STRUCK_AFTER)
            fault.strike(stage)
            stage.wait(FIRST)
            fault.before_push(stage)
            time.sleep(0.3)
            landed = stage.push(1)
            stage.begin(FIRST, SECOND)
            stage.wait(FIRST + SECOND)
            ended = stage.runner.ended()
            states = stage.states()
            faults = sum(each.health.faults for each in stage.engine.server_group.members)
        finally:
            stage.close()
    assert sorted(ended) == list(range(FIRST + SECOND)), "each group ends once"
    for number, rollouts in ended.items():
        for rollout, seed in zip(rollouts, (2 * number, 2 * number + 1), strict=True):
            assert list(rollout.response_ids) == [5, 10 + number, seed]
            assert set(rollout.versions) == {int(number >= FIRST)}
    if fault.states is not None:
        fits = [now in wanted for now, wanted in zip(states, fault.states, strict=True)]
        assert all(fits), states
    assert len(stage.missed) == fault.missed, stage.missed
    return {
        "fault": fault.name,
        "learnt": len(ended),
        "lost": 0,
        "server faults": faults,
        "landed": len(landed),
        "states": states,
        "seconds": round(time.monotonic() - begin, 1),
    }


def main() -> int:
    """Runs all cases. Returns how many lost something."""
    failed = 0
    rows = []
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = happened(fault, Path(folder))
            except (AssertionError, RFTMegaError) as error:
                failed += 1
                row = {"fault": fault.name, "failed": str(error)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    Path("runs").mkdir(exist_ok=True)
    counted = {"faults": len(rows), "lost": failed}
    content = {"machine": machine.here(), "rows": {"all": counted}, "cases": rows}
    Path("runs/server_chaos.json").write_text(json.dumps(content, indent=2))
    return failed


if __name__ == "__main__":
    sys.exit(main())
