"""Options of the tools that a model may call in multi-turn rollouts."""

from dataclasses import dataclass, field
from typing import Any

from rftmega.config.options.bounds import Count, NotNegativeInt, Positive
from rftmega.config.options.secrecy import SecretCommand, SecretValues


@dataclass(frozen=True)
class ToolLimits:
    """Limits of tool calls in one rollout."""

    seconds: Positive = 30.0
    """Maximum seconds of one call, excluding retries."""

    rollout_seconds: Positive = 600.0
    """Maximum seconds of all calls of one rollout together; the model is told when they are used
    up.
    """

    characters: Count = 8192
    """Maximum characters of one reply; the middle of a longer one is replaced by a note of how much
    is missing.
    """

    retries: NotNegativeInt = 3
    """Maximum retries of a call after an infrastructure failure, for tools declared idempotent."""

    pause: Positive = 0.5
    """Seconds before the first retry; doubled before each further one."""


@dataclass(frozen=True)
class SandboxTool:
    """A Python interpreter in the sandbox of reward.code, one per rollout."""

    python: bool = False
    """Give the model a tool `python` that runs code; variables persist from one call to the next.
    """

    seconds: Positive = 10.0
    """Maximum wall-clock seconds of one call; after that the interpreter is killed, and restarted
    at the next call.
    """

    processor_seconds: Positive = 60.0
    """Maximum CPU seconds of each process of an interpreter, over all its calls."""

    memory_mib: Count = 1024
    """Maximum address space of each process of an interpreter."""


@dataclass(frozen=True)
class HTTPTool:
    """A tool on a web server."""

    name: str = ""
    """Name of the tool."""

    description: str = ""
    """Description of the tool for the model."""

    url: str = ""
    """URL to which the arguments are posted as JSON; the body of the response is the tool's reply.
    """

    parameters: dict[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments, {type: object, properties: {...}}; empty: no arguments."""

    key_env: str = ""
    """Environment variable whose value is sent as a bearer token; empty: no token is sent."""

    idempotent: bool = False
    """Declare that a call may be sent twice, so that failed calls are retried."""

    seconds: float = 0.0
    """Maximum seconds of one call; 0: limits.seconds."""


@dataclass(frozen=True)
class MCPServer:
    """A server of the Model Context Protocol (MCP); the model gets all tools that it lists."""

    name: str = ""
    """Name of the server in error messages."""

    command: SecretCommand = field(default_factory=list)
    """Command that starts the server, which then communicates over its standard input and output.
    """

    url: str = ""
    """URL of a server with streamable HTTP, instead of a command."""

    env: SecretValues = field(default_factory=dict)
    """Environment variables of the command, in addition to HOME, PATH and the like. To keep a key
    out of the file write {API_KEY: "${oc.env:API_KEY}"}; values are not stored.
    """

    key_env: str = ""
    """Environment variable whose value is sent to `url` as a bearer token; empty: no token is sent.
    """

    per_rollout: bool = False
    """Open a separate connection for each rollout (for a command: start a separate server), for
    stateful tools. Otherwise the rollouts of a process share one.
    """

    tools: list[str] = field(default_factory=list)
    """Names of the tools to give to the model; empty: all tools of the server."""

    idempotent: list[str] = field(default_factory=list)
    """Names of tools whose calls may be sent twice, in addition to those that the server marks as
    such; not with per_rollout, because a new connection has lost the state.
    """

    start_seconds: Positive = 60.0
    """Maximum seconds for the server to start and to list its tools."""
