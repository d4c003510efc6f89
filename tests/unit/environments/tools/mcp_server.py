"""A server of the Model Context Protocol, on standard streams or on the port that is given."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

server = MCPServer("numbers")
count = 0


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def bump() -> int:
    """Counts."""
    global count
    count += 1
    return count


@server.tool()
def pid() -> int:
    """Tells the process."""
    return os.getpid()


@server.tool()
async def never() -> str:
    """Never ends."""
    await asyncio.Event().wait()
    return ""


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def die_once(path: str) -> str:
    """Dies, unless the file is there."""
    if os.path.exists(path):
        return "alive"
    open(path, "w").close()
    os.kill(os.getpid(), 9)
    return ""


@server.tool()
def refuse() -> str:
    """Refuses."""
    raise ToolError("no such number")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
