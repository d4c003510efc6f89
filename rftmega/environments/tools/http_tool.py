"""Tools that are HTTP endpoints, with one URL for each tool."""

import json
from collections.abc import Sequence
from typing import Any

import httpx

from rftmega.config.options.tools import HTTPTool
from rftmega.core.errors import ConfigError, InfrastructureFault, described
from rftmega.core.types import Prompt
from rftmega.environments.tools.tool import NO_ARGUMENTS, PlainSession, ToolError, ToolSpec
from rftmega.environments.tools.web_address import bearer, checked_address

LARGEST_REPLY = 4 << 20  # maximum bytes read of a reply
SHOWN = 200  # characters of a reply quoted in an error
CONNECTIONS = 256  # concurrent, per process


class HTTPTools:
    """HTTPTools is a toolset of HTTP endpoints, which keep no state per rollout."""

    stateful = False

    def __init__(self, tools: Sequence[HTTPTool]):
        """Raises ConfigError if a tool lacks a required field, or the environment variable with its
        key is not set.
        """
        self._tools = {tool.name: tool for tool in tools}
        self.names = [tool.name for tool in tools]
        self._specs = [_spec(tool) for tool in tools]
        self._headers = {
            tool.name: {"content-type": "application/json"} | bearer(tool.key_env, _option(tool))
            for tool in tools
        }
        self._client: httpx.AsyncClient | None = None

    async def open(self) -> list[ToolSpec]:
        """Creates the HTTP client and returns the tools' specs; opens no connection yet."""
        if self._client is None:
            limits = httpx.Limits(max_connections=CONNECTIONS)
            # the runner enforces the time limit of a call
            self._client = httpx.AsyncClient(timeout=None, limits=limits)
        return self._specs

    def session(self, task: Prompt | None = None) -> "HTTPSession":
        assert self._client is not None
        return HTTPSession(self._client, self._tools, self._headers)

    async def close(self) -> None:
        """Closes the HTTP client and its connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


class HTTPSession(PlainSession):
    """HTTPSession sends the tool calls of one rollout as POST requests."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        tools: dict[str, HTTPTool],
        headers: dict[str, dict[str, str]],
    ):
        """`headers`: HTTP headers of each tool's requests, by the tool's name."""
        self._client, self._tools, self._headers = client, tools, headers

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Sends the arguments in a POST request and returns the response body.

        Raises ToolError for status 4xx except 429. Raises InfrastructureFault for any other status
        except 2xx, and if there is no response.
        """
        try:
            content = json.dumps(arguments, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise ToolError(f"wrong arguments of {name}: {error}") from error
        try:
            status, reply = await self._posted(name, content)
        except Exception as error:  # of the client, its codecs, the address or the system
            raise InfrastructureFault(
                f"The tool {name} gave no answer: {described(error)}."
            ) from error
        if 200 <= status < 300:
            return reply
        if 400 <= status < 500 and status != 429:
            raise ToolError(reply or f"status {status}")
        raise InfrastructureFault(
            f"The tool {name} answered with status {status}: {reply[:SHOWN]!r}."
        )

    async def _posted(self, name: str, content: bytes) -> tuple[int, str]:
        """Sends `content` to the tool `name` in a POST request. Returns (status, body) of the
        response; the body is truncated to LARGEST_REPLY bytes.
        """
        reply = bytearray()
        post = self._client.stream(
            "POST", self._tools[name].url, content=content, headers=self._headers[name]
        )
        async with post as response:
            async for piece in response.aiter_bytes():
                reply += piece
                if len(reply) > LARGEST_REPLY:
                    break
            encoding = response.charset_encoding or "utf-8"
        return response.status_code, _decoded(bytes(reply[:LARGEST_REPLY]), encoding)


def _decoded(reply: bytes, encoding: str) -> str:
    try:
        return reply.decode(encoding, errors="replace")
    except LookupError:  # unknown encoding
        return reply.decode(errors="replace")


def _spec(tool: HTTPTool) -> ToolSpec:
    """Returns the spec of an HTTP tool. Raises ConfigError if a required field is empty or the URL
    is invalid.
    """
    for field in ("name", "description", "url"):
        if not getattr(tool, field):
            raise ConfigError(f"{_option(tool)}: {field} is empty.")
    checked_address(tool.url, _option(tool))
    return ToolSpec(
        tool.name,
        tool.description,
        tool.parameters or NO_ARGUMENTS,
        late_is_fault=True,
        idempotent=tool.idempotent,
        seconds=tool.seconds,
    )


def _option(tool: HTTPTool) -> str:
    return f"environment.http ({tool.name or 'without a name'})"
