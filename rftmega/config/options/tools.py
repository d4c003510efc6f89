"""Options of the tools that a model may call in a rollout of many turns."""

from dataclasses import dataclass, field
from typing import Any

from rftmega.config.options.bounds import Count, NotNegativeInt, Positive
from rftmega.config.options.secrecy import SecretCommand, SecretValues


@dataclass(frozen=True)
class ToolLimits:
    """Limits of the tools of one rollout."""

    seconds: Positive = 30.0
    """Seconds that one call may take, retries of it apart."""

    rollout_seconds: Positive = 600.0
    """Seconds that all calls of one rollout may take; the model is told when they are used up."""

    characters: Count = 8192
    """Characters of one reply; the middle of a longer one is left out, with a note of how much."""

    retries: NotNegativeInt = 3
    """Further attempts of a call that the infrastructure failed, of tools that are declared
    idempotent.
    """

    pause: Positive = 0.5
    """Seconds before the first of these attempts; twice as long before each further one."""


@dataclass(frozen=True)
class SandboxTool:
    """A Python interpreter in the sandbox of reward.code, one for each rollout."""

    python: bool = False
    """Give the model a tool `python` that runs code; names stay from one call to the next."""

    seconds: Positive = 10.0
    """Seconds of the clock that one call may take; the interpreter is killed after them, and begins
    anew at the next call.
    """

    processor_seconds: Positive = 60.0
    """Seconds of the processor that each process of an interpreter may take, over all its calls."""

    memory_mib: Count = 1024
    """Address space that each process of an interpreter may take."""


@dataclass(frozen=True)
class HTTPTool:
    """A tool that a web server runs."""

    name: str = ""
    """Name of the tool."""

    description: str = ""
    """What the model is told that the tool does."""

    url: str = ""
    """Address that the arguments are posted to as JSON; the body of the answer is the reply."""

    parameters: dict[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments, {type: object, properties: {...}}; empty: it takes none."""

    key_env: str = ""
    """Environment variable whose value is sent as a bearer token; empty: none is sent."""

    idempotent: bool = False
    """Says that a call may be sent twice, so that failed ones are tried again."""

    seconds: float = 0.0
    """Seconds that one call may take; 0: as limits.seconds says."""


@dataclass(frozen=True)
class MCPServer:
    """A server of the Model Context Protocol; all tools that it lists are given to the model."""

    name: str = ""
    """Name that errors call the server by."""

    command: SecretCommand = field(default_factory=list)
    """Command that starts the server, which then speaks over its standard input and output."""

    url: str = ""
    """Address of a server that speaks streamable HTTP, in place of a command."""

    env: SecretValues = field(default_factory=dict)
    """Environment variables of the command, beside HOME, PATH and others of their kind. A key stays
    out of the file as {API_KEY: "${oc.env:API_KEY}"}; no value is stored.
    """

    key_env: str = ""
    """Environment variable whose value is sent to `url` as a bearer token; empty: none is sent."""

    per_rollout: bool = False
    """Give each rollout a connection of its own (of a command: a server of its own), for tools that
    keep a state. Otherwise the rollouts of a process share one.
    """

    tools: list[str] = field(default_factory=list)
    """Names of the tools to give to the model; empty: all of the server."""

    idempotent: list[str] = field(default_factory=list)
    """Names of tools whose calls may be sent twice, beside those that the server marks as such; not
    with per_rollout, where a new connection has lost the state.
    """

    start_seconds: Positive = 60.0
    """Seconds that the server may take to start and to list its tools."""
