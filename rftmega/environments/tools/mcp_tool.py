"""Tools of Model Context Protocol (MCP) servers, called through the official client."""

import asyncio
import logging
import os
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from rftmega.config.options.tools import MCPServer
from rftmega.core.errors import ConfigError, InfrastructureFault, described
from rftmega.core.types import Prompt
from rftmega.environments.tools.tool import PlainSession, ToolError, ToolSpec
from rftmega.environments.tools.web_address import bearer, checked_address

if TYPE_CHECKING:  # its import takes half a second
    from mcp import Client

log = logging.getLogger(__name__)
ENDING = 15.0  # seconds that closing a connection may take; its client kills the server after 4
PAGES = 100  # maximum pages of the tool list


class MCPTools:
    """MCPTools is the toolset of one MCP server."""

    def __init__(self, options: MCPServer):
        """Raises ConfigError for inconsistent options. Opens no connection yet."""
        option = f"environment.mcp ({options.name or 'without a name'})"
        if not options.name or bool(options.command) == bool(options.url):
            raise ConfigError(f"{option}: give a name, and a command or a url.")
        if options.url and options.env:
            raise ConfigError(f"{option}: env is for a command, and there is a url.")
        if options.command and options.key_env:
            raise ConfigError(f"{option}: key_env is for a url, and there is a command.")
        if options.per_rollout and options.idempotent:
            raise ConfigError(
                f"{option}: idempotent is not for per_rollout=true, whose state is gone."
            )
        if options.url:
            checked_address(options.url, option)
        self.headers = bearer(options.key_env, option)
        self.options, self.option = options, option
        self.names: list[str] = []  # known once it is open
        self.stateful = options.per_rollout
        self._shared: Connection | None = None
        self._specs: list[ToolSpec] | None = None
        self._connecting = asyncio.Lock()

    async def open(self) -> list[ToolSpec]:
        """Connects to the server and returns the specs of its tools.

        Raises InfrastructureFault if the server can't be reached, ConfigError if the options name a
        tool that the server lacks.
        """
        if self._specs is None:
            connection = await self.connection()
            try:
                listed = await connection.tools()
            finally:
                if self.options.per_rollout:
                    await self.close()
            self._specs = self._chosen(listed)
        return self._specs

    def session(self, task: Prompt | None = None) -> "MCPSession":
        return MCPSession(self)

    async def close(self) -> None:
        """Closes the connection that the rollouts share."""
        shared, self._shared = self._shared, None
        if shared is not None:
            await shared.close()

    async def connection(self) -> "Connection":
        """Returns the connection that the rollouts share; connects again if it has ended."""
        async with self._connecting:
            if self._shared is None or self._shared.ended:
                await self.close()
                self._shared = await self.connected()
            return self._shared

    async def connected(self) -> "Connection":
        """Returns a new connection. Raises InfrastructureFault if the server is not ready within
        the option start_seconds.
        """
        connection = Connection(self)
        try:
            async with asyncio.timeout(self.options.start_seconds):
                await connection.ready()
        except BaseException as error:
            await connection.close()
            if isinstance(error, TimeoutError):
                raise InfrastructureFault(
                    f"{self.option}: the server did not start within {self.options.start_seconds:g} s."
                ) from error
            raise
        return connection

    def _chosen(self, listed: list[Any]) -> list[ToolSpec]:
        """Returns the specs of the tools that the options select from `listed`, the server's tools:
        all of them if the options name none. Raises ConfigError if a named tool is missing.
        """
        known = [tool.name for tool in listed]
        wanted = {*self.options.tools, *self.options.idempotent}
        if missing := sorted(wanted.difference(known)):
            raise ConfigError(
                f"{self.option}: the server has no tool {', '.join(missing)}. It has: {', '.join(known)}."
            )
        return [
            ToolSpec(
                tool.name,
                tool.description or "",
                tool.input_schema,
                late_is_fault=True,
                idempotent=not self.options.per_rollout and self._repeatable(tool),
            )
            for tool in listed
            if tool.name in (self.options.tools or known)
        ]

    def _repeatable(self, tool: Any) -> bool:
        hints = tool.annotations
        marked = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        return marked or tool.name in self.options.idempotent


class MCPSession(PlainSession):
    """MCPSession calls tools for one rollout, over the shared connection or over a connection for
    this rollout only.
    """

    def __init__(self, tools: MCPTools):
        """Creates a session of the toolset `tools`, without a connection: `ready` opens it."""
        self._tools = tools
        self._held: Connection | None = None

    async def ready(self) -> None:
        """Opens the rollout's own connection, or gets the shared connection.

        A rollout's own connection is not opened again after it has ended, since the server's state
        is lost.
        """
        if not self._tools.options.per_rollout:
            self._held = await self._tools.connection()
        elif self._held is None:
            self._held = await self._tools.connected()

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Returns the text of a tool call's result.

        Raises ToolError if the server reports that the call failed, InfrastructureFault if the
        server can't be reached.
        """
        assert self._held is not None
        return await self._held.call(name, arguments)

    async def close(self) -> None:
        """Closes the rollout's own connection, if it has one."""
        held, self._held = self._held, None
        if held is not None and self._tools.options.per_rollout:
            await held.close()


class Connection:
    """Connection keeps an MCP client open in its own task, since the task that opened a client must
    also close it.
    """

    def __init__(self, tools: MCPTools):
        """Starts a task that connects to the server of the toolset `tools`."""
        self._tools, self.option = tools, tools.option
        self._closing = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep())
        self._lost = False

    @property
    def ended(self) -> bool:
        """Returns whether the connection can't be used any more."""
        return self._lost or self._task.done()

    async def ready(self) -> None:
        """Waits until the connection is established. Raises InfrastructureFault if connecting
        fails.
        """
        await asyncio.shield(self._client)

    async def tools(self) -> list[Any]:
        """Returns all tools that the server lists, in the classes of the MCP client."""
        found: list[Any] = []
        cursor = None
        for _ in range(PAGES):
            page = await self._asked(self._client.result().list_tools(cursor=cursor))
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        return found

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Returns the text of a tool call's result. Raises ToolError if the call failed,
        InfrastructureFault if the server can't be reached.
        """
        result = await self._asked(self._client.result().call_tool(name, arguments))
        text = "\n".join(map(_text, result.content))
        if result.is_error:
            raise ToolError(text or f"{name} failed")
        return text

    async def close(self) -> None:
        """Closes the connection, and stops the server if this connection started it by a command."""
        self._closing.set()
        if not self._client.done():  # the task does not wait for the event yet
            self._task.cancel()
        _, waiting = await asyncio.wait([self._task], timeout=ENDING)
        for task in waiting:
            task.cancel()

    async def _asked(self, work: Any) -> Any:
        """Awaits `work`, a request to the server, and returns the reply.

        Raises ToolError if the server reports invalid parameters, InfrastructureFault for all other
        failures.
        """
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS

        asked = asyncio.ensure_future(work)
        try:
            await asyncio.wait([asked, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise InfrastructureFault(f"{self.option}: the connection has ended.")
            return asked.result()
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(error.message) from error
            self._lost = True  # also if the server has forgotten the session
            raise InfrastructureFault(f"{self.option}: {error.message}.") from error
        except InfrastructureFault:
            raise
        except Exception as error:  # a protocol violation, a closed stream
            raise InfrastructureFault(f"{self.option}: {described(_innermost(error))}.") from error
        finally:
            asked.cancel()

    async def _keep(self) -> None:
        """Connects to the server, and keeps the connection open until `close` is called or the
        server ends. Runs as the connection's task.
        """
        try:
            async with opened(self._tools) as client:
                self._client.set_result(client)
                await self._closing.wait()
        except Exception as error:  # of the client, anyio's groups or the system
            if not self._client.done():
                command = self._tools.options.command
                advice = f" Try `{shlex.join(command)}` by hand." if command else ""
                fault = (
                    f"{self.option}: no connection to the server: {_innermost(error)!r}.{advice}"
                )
                self._client.set_exception(InfrastructureFault(fault))
                self._client.exception()  # marks it as retrieved if no caller waits
            elif not self._closing.is_set():
                log.warning("%s: the connection has ended: %r.", self.option, _innermost(error))


@asynccontextmanager
async def opened(tools: MCPTools) -> "AsyncIterator[Client]":
    """Opens an MCP client of the toolset's server, over the server's standard streams or HTTP."""
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    options = tools.options
    async with AsyncExitStack() as stack:
        if options.url:
            client = await stack.enter_async_context(_http_client(tools.headers))
            transport: Any = streamable_http_client(options.url, http_client=client)
        else:
            first, *rest = options.command
            started = StdioServerParameters(command=first, args=rest, env=options.env)
            nowhere = stack.enter_context(open(os.devnull, "w"))  # noqa: SIM115
            transport = stdio_client(started, errlog=nowhere)
        yield await stack.enter_async_context(Client(transport, cache=None))


def _http_client(headers: dict[str, str]) -> Any:
    from mcp.shared._httpx_utils import create_mcp_http_client

    return create_mcp_http_client(headers=headers)


def _text(block: Any) -> str:
    """Returns the text of `block`, a content block of a tool's result; the block's type in brackets
    if it has no text.
    """
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and getattr(block.resource, "text", None) is not None:
        return str(block.resource.text)
    return f"[{block.type}]"


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
