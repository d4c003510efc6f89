"""A tool that runs Python code in a sandboxed interpreter (rftmega/sandbox)."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rftmega.config.options.tools import SandboxTool
from rftmega.core.errors import ConfigError, InfrastructureFault
from rftmega.core.types import Prompt
from rftmega.environments.tools.tool import PlainSession, ToolError, ToolSpec

log = logging.getLogger(__name__)
NAME = "python"
ROOT = Path(__file__).parents[3]
STARTING = 60.0  # seconds for the sandbox to start, on a busy machine
ENDING = 10.0  # seconds for it to end all its processes
LONGEST_LINE = 8 << 20  # bytes of a reply: the retained output, as JSON
CODE = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python code."}},
    "required": ["code"],
    "additionalProperties": False,
}


class SandboxTools:
    """SandboxTools is a toolset with the single tool `python`. Each rollout has its own
    interpreter, which starts at the rollout's first call.
    """

    stateful = True

    def __init__(self, options: SandboxTool):
        """Describes the tool `python` according to the options; starts no interpreter yet."""
        self.options = options
        self.names = [NAME]
        self.namespaces: bool | None = None  # whether they are available here; None: not tried yet
        description = (
            "Runs Python code and returns what it prints and the value of a last expression. "
            "Names stay from one call to the next. There is no network. "
            f"One call may take {options.seconds:g} seconds."
        )
        # the sandbox enforces the limit of a call; exceeding this one is its own failure
        limit = options.seconds + ENDING
        self._spec = ToolSpec(NAME, description, CODE, late_is_fault=True, seconds=limit)

    async def open(self) -> list[ToolSpec]:
        """Tests the sandbox by starting an interpreter, and returns the tool's spec.

        Raises ConfigError if this machine does not support the sandbox, InfrastructureFault if the
        sandbox fails.
        """
        if self.namespaces is None:
            session = SandboxSession(self)
            try:
                await session.ready()
            finally:
                await session.close()
        return [self._spec]

    def session(self, task: Prompt | None = None) -> "SandboxSession":
        return SandboxSession(self)

    async def close(self) -> None:
        """Does nothing, since each session ends its own interpreter."""

    def learn(self, lacks: dict[str, bool]) -> None:
        """Stores whether this machine supports Linux namespaces, as the first sandbox found, and
        logs a warning if it does not.

        `lacks`: for each sandbox feature, whether this machine lacks it.
        """
        if self.namespaces is None and lacks["namespaces"]:
            missing = ", ".join(name for name, lacking in lacks.items() if lacking)
            log.warning(
                "environment.sandbox: this machine gives the sandbox no %s; docs/rewards.md says what that means.",
                missing,
            )
        self.namespaces = not lacks["namespaces"]

    def job(self) -> dict[str, Any]:
        """Returns the time and memory limits, and whether to use namespaces, which are sent to a
        new sandbox.
        """
        return {
            "seconds": self.options.processor_seconds,
            "call_seconds": self.options.seconds,
            "memory": self.options.memory_mib << 20,
            "namespaces": self.namespaces,
        }


class SandboxSession(PlainSession):
    """SandboxSession runs the Python interpreter of one rollout."""

    def __init__(self, tools: SandboxTools):
        """Creates a session of the toolset `tools`, without an interpreter: `ready` starts it."""
        self._tools = tools
        self._process: asyncio.subprocess.Process | None = None
        self._ending: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Starts an interpreter if none is running.

        Raises InfrastructureFault if the interpreter can't be started, ConfigError if this machine
        does not support the sandbox.
        """
        if self._process is not None:
            return
        try:
            async with asyncio.timeout(STARTING):
                self._process = await self._started()
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise InfrastructureFault(
                    f"environment.sandbox did not start within {STARTING:g} s."
                ) from error
            raise

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Runs the code in `arguments` and returns its output.

        Raises ToolError if the code raised an exception, took too long or ended the interpreter.
        Raises InfrastructureFault if the sandbox failed.
        """
        assert self._process is not None
        try:
            reply = await self._asked(self._process, arguments["code"].encode(errors="replace"))
        except BaseException:  # also if cancelled: the next call must not read a late reply
            await self.close()
            raise
        text, ended = reply["text"], reply["ended"]
        if ended:
            await self.close()
            raise ToolError(
                f"{text}\n[the interpreter is gone, {ended}: all names are lost, and the next call begins a new one]".lstrip()
            )
        if reply["failed"]:
            raise ToolError(text)
        return str(text)

    async def close(self) -> None:
        """Ends the interpreter and all its processes."""
        process, self._process = self._process, None
        if process is not None:
            self._ending = asyncio.create_task(_end(process))
        if self._ending is not None:
            await asyncio.shield(self._ending)  # continues if the call is cancelled

    async def _started(self) -> asyncio.subprocess.Process:
        """Returns the process of a new sandbox that is ready to run code."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-s", "-P", "-m", "rftmega.sandbox"),
                stdin=pipe,
                stdout=pipe,
                stderr=asyncio.subprocess.DEVNULL,
                env=_environment(),
                cwd="/",
                start_new_session=True,
                limit=LONGEST_LINE,
            )
        except OSError as error:
            raise InfrastructureFault(f"environment.sandbox can't be started: {error}.") from error
        self._process = process  # so that `close` ends it even if the start fails
        job = json.dumps(self._tools.job()).encode()
        header = json.dumps({"size": len(job), "tests": 0}).encode() + b"\n"
        told = await self._said(process, header + job)
        if "refused" in told:
            raise ConfigError(f"environment.sandbox: {told['refused']}.")
        self._tools.learn(told["lacks"])
        return process

    async def _asked(self, process: asyncio.subprocess.Process, code: bytes) -> dict[str, Any]:
        header = json.dumps({"size": len(code)}).encode() + b"\n"
        return await self._said(process, header + code)

    async def _said(self, process: asyncio.subprocess.Process, asked: bytes) -> dict[str, Any]:
        """Sends the bytes `asked` to the sandbox and returns its reply, one line of JSON, as a
        dictionary. Raises InfrastructureFault if the sandbox failed.
        """
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it has ended; its output is still readable
            process.stdin.write(asked)
            await process.stdin.drain()
        try:
            line = await process.stdout.readline()
            told: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
        except (ValueError, RecursionError) as error:  # an unterminated line, or invalid JSON
            raise InfrastructureFault(
                f"environment.sandbox: the sandbox's reply can't be read: {error}."
            ) from error
        if not told:
            raise InfrastructureFault("environment.sandbox: the sandbox ended without a word.")
        if "undecided" in told:
            raise InfrastructureFault(f"environment.sandbox: {told['undecided']}.")
        return told


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a sandbox and its processes; kills them if they don't end within ENDING seconds."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()  # signals it to end
    try:
        async with asyncio.timeout(ENDING):
            await process.stdout.read()
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    return one_thread | {
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
    }
