"""Construction of toolsets from a run's options."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Protocol

from rftmega.config.options.tools import HTTPTool, MCPServer, SandboxTool
from rftmega.config.user_code.functions import function_of
from rftmega.core.errors import ConfigError
from rftmega.environments.tools.function_schema import OPTION
from rftmega.environments.tools.http_tool import HTTPTools
from rftmega.environments.tools.mcp_tool import MCPTools
from rftmega.environments.tools.python_functions import PythonClass, PythonFunctions
from rftmega.environments.tools.sandbox_tool import SandboxTools
from rftmega.environments.tools.tool import Toolset


class ToolOptions(Protocol):
    """ToolOptions is the interface of options that select the tools of an environment."""

    @property
    def tools(self) -> Sequence[str]: ...

    @property
    def sandbox(self) -> SandboxTool: ...

    @property
    def http(self) -> Sequence[HTTPTool]: ...

    @property
    def mcp(self) -> Sequence[MCPServer]: ...


def toolsets_of(options: ToolOptions) -> list[Toolset]:
    """Creates the toolsets that the options select, without opening them.

    Raises ConfigError for invalid options, if no tool is selected, and if two tools have the same
    name. The names of MCP tools can only be checked after their servers are opened.
    """
    found = list(_toolsets(options))
    if not found:
        raise ConfigError(
            "environment.type=tools has no tools. Give environment.tools, environment.sandbox.python=true, environment.http or "
            "environment.mcp."
        )
    names = [name for toolset in found for name in toolset.names]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"environment: two tools have the name {', '.join(twice)}. Rename one, or leave one out."
        )
    return found


def _toolsets(options: ToolOptions) -> Iterator[Toolset]:
    functions = []
    for reference in options.tools:
        if inspect.isclass(function_of(reference, OPTION)):
            yield PythonClass(reference)
        else:
            functions.append(reference)
    if functions:
        yield PythonFunctions(functions)
    if options.sandbox.python:
        yield SandboxTools(options.sandbox)
    if options.http:
        yield HTTPTools(options.http)
    for server in options.mcp:
        yield MCPTools(server)
