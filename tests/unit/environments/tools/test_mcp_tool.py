import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rftmega.config.options.tools import MCPServer, ToolLimits
from rftmega.core.errors import ConfigError, InfrastructureFault
from rftmega.environments.tools.mcp_tool import MCPTools
from rftmega.environments.tools.tool_runner import OpenTools, ToolReply, ToolRunner
from tests.unit.environments.tools.tool_calls import in_rollout

SERVER = str(Path(__file__).with_name("mcp_server.py"))
COMMAND = [sys.executable, SERVER]
SHARED = MCPServer("numbers", command=COMMAND)
OWN = MCPServer("numbers", command=COMMAND, per_rollout=True)
LIMITS = ToolLimits(seconds=60, pause=0.001)


@contextmanager
def web_server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a server that listens on a port of this machine."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen([*COMMAND, str(port)], stdout=quiet, stderr=quiet) as process:
        try:
            while not listens(port):
                assert process.poll() is None
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


async def number(runner: ToolRunner, name: str) -> int:
    return int((await runner.call(name, {})).text)


def test_tools_are_listed_and_called_and_refusals_are_the_models_failure() -> None:
    async def work(runner: ToolRunner) -> tuple[list[ToolReply], dict[str, float]]:
        calls = [("add", {"a": 1, "b": 2}), ("add", {"a": 1}), ("refuse", {})]
        return [await runner.call(name, given) for name, given in calls], runner.measures

    (good, wrong, refused), counted = in_rollout(work, MCPTools(SHARED), limits=LIMITS)
    assert (good.text, good.failed) == ("3", False)
    assert wrong.failed and "'b' is a required property" in wrong.text
    assert refused.failed and refused.text.endswith("no such number")
    assert (counted["tool_errors"], counted["tool_retries"]) == (2, 0)


def test_tools_may_be_chosen_and_marked_idempotent() -> None:
    options = MCPServer(
        "numbers", command=COMMAND, tools=["add", "bump", "pid"], idempotent=["bump"]
    )

    async def work() -> dict[str, bool]:
        tools = OpenTools([MCPTools(options)], LIMITS)
        try:
            return {spec.name: spec.idempotent for spec in await tools.open()}
        finally:
            await tools.close()

    assert asyncio.run(work()) == {"add": True, "bump": True, "pid": False}


def test_a_tool_that_the_server_has_not_is_refused() -> None:
    options = MCPServer("numbers", command=COMMAND, tools=["divide"])
    with pytest.raises(ConfigError, match=r"no tool divide\. It has: add, bump"):
        in_rollout(lambda runner: number(runner, "bump"), MCPTools(options))


def test_rollouts_share_a_connection_and_all_of_it_ends() -> None:
    async def work() -> list[int]:
        tools = OpenTools([MCPTools(SHARED)], LIMITS)
        await tools.open()
        async with tools.runner() as first, tools.runner() as second:
            found = [
                await number(first, "bump"),
                await number(second, "bump"),
                await number(first, "pid"),
            ]
        await tools.close()
        return found

    *counts, pid = asyncio.run(work())
    assert counts == [1, 2]
    assert not Path(f"/proc/{pid}").exists()


def test_a_rollout_may_have_a_server_of_its_own() -> None:
    async def work() -> tuple[list[int], list[bool]]:
        tools = OpenTools([MCPTools(OWN)], LIMITS)
        await tools.open()
        async with tools.runner() as first, tools.runner() as second:
            counts = [await number(first, "bump"), await number(second, "bump")]
            pids = [await number(first, "pid"), await number(second, "pid")]
        gone = [not Path(f"/proc/{pid}").exists() for pid in pids]
        await tools.close()
        return counts, gone

    assert asyncio.run(work()) == ([1, 1], [True, True])


def test_a_server_that_is_killed_is_a_fault_and_the_next_call_has_a_new_one() -> None:
    async def work(runner: ToolRunner) -> list[int]:
        found = [await number(runner, "bump")]
        waiting = asyncio.create_task(runner.call("never", {}))
        os.kill(await number(runner, "pid"), signal.SIGKILL)
        with pytest.raises(
            InfrastructureFault, match=r"environment\.mcp \(numbers\): Connection closed"
        ):
            await waiting
        return [*found, await number(runner, "bump")]

    assert in_rollout(work, MCPTools(SHARED), limits=LIMITS) == [1, 1]


def test_a_call_that_may_be_repeated_outlives_its_server(tmp_path: Path) -> None:
    async def work(runner: ToolRunner) -> tuple[str, float]:
        reply = await runner.call("die_once", {"path": str(tmp_path / "died")})
        return reply.text, runner.measures["tool_retries"]

    assert in_rollout(work, MCPTools(SHARED), limits=LIMITS) == ("alive", 1.0)


def test_a_rollout_whose_own_server_died_gets_no_other_one(tmp_path: Path) -> None:
    async def work(runner: ToolRunner) -> float:
        for _ in range(2):
            with pytest.raises(InfrastructureFault):
                await runner.call("die_once", {"path": str(tmp_path / "died")})
        return runner.measures["tool_retries"]

    assert in_rollout(work, MCPTools(OWN), limits=LIMITS) == 0.0


def test_a_call_that_takes_too_long_is_a_fault_and_the_connection_stays() -> None:
    async def work(runner: ToolRunner) -> list[int]:
        found = [await number(runner, "bump")]
        runner._limits = ToolLimits(seconds=0.5)
        with pytest.raises(InfrastructureFault, match=r"never gave no reply within 0\.5 s"):
            await runner.call("never", {})
        runner._limits = LIMITS
        return [*found, await number(runner, "bump")]

    assert in_rollout(work, MCPTools(SHARED), limits=LIMITS) == [1, 2]


def test_a_server_over_http_may_come_back() -> None:
    port = free_port()
    options = MCPServer("numbers", url=f"http://127.0.0.1:{port}/mcp")

    async def work() -> list[int]:
        tools = OpenTools([MCPTools(options)], LIMITS)
        with web_server(port) as process:
            await tools.open()
            async with tools.runner() as runner:
                found = [await number(runner, "bump"), await number(runner, "bump")]
                process.kill()
                process.wait()
                with pytest.raises(InfrastructureFault):
                    await number(runner, "bump")
                with web_server(port):
                    found.append(await number(runner, "bump"))
        await tools.close()
        return found

    assert asyncio.run(work()) == [1, 2, 1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (MCPServer("a", command=["/nonexistent"]), "No such file.*Try `/nonexistent` by hand"),
        (MCPServer("a", command=["true"]), "Connection closed"),
        (
            MCPServer("a", command=["sleep", "1000"], start_seconds=0.1),
            r"did not start within 0\.1 s",
        ),
        (MCPServer("a", url="http://127.0.0.1:9/mcp"), "no connection to the server"),
    ],
)
def test_a_server_that_does_not_start_is_a_fault(options: MCPServer, says: str) -> None:
    with pytest.raises(InfrastructureFault, match=says):
        in_rollout(lambda runner: number(runner, "bump"), MCPTools(options))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (MCPServer(command=["a"]), "give a name"),
        (MCPServer("a"), "a command or a url"),
        (MCPServer("a", command=["a"], url="http://x"), "a command or a url"),
        (MCPServer("a", url="http://x", env={"a": "b"}), "env is for a command"),
        (MCPServer("a", command=["a"], key_env="HOME"), "key_env is for a url"),
        (MCPServer("a", command=["a"], per_rollout=True, idempotent=["b"]), "not for per_rollout"),
        (MCPServer("a", url="http://me:s3cr3t@x"), "holds a user or a password"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(options: MCPServer, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MCPTools(options)
