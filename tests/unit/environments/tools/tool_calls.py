"""Opens toolsets and calls their tools, as a rollout does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from rftmega.config.options.tools import ToolLimits
from rftmega.environments.tools.tool import Toolset
from rftmega.environments.tools.tool_runner import OpenTools, ToolRunner

Result = TypeVar("Result")
LIMITS = ToolLimits()


@contextlib.asynccontextmanager
async def running(
    *toolsets: Toolset,
    limits: ToolLimits = LIMITS,
) -> AsyncIterator[ToolRunner]:
    """Yields the runner of one rollout."""
    tools = OpenTools(toolsets, limits)
    try:
        await tools.open()
        async with tools.runner() as runner:
            yield runner
    finally:
        await tools.close()


def in_rollout(
    work: Callable[[ToolRunner], Awaitable[Result]],
    *toolsets: Toolset,
    limits: ToolLimits = LIMITS,
) -> Result:
    """Returns what `work` makes of a runner."""

    async def all_of_it() -> Result:
        async with running(*toolsets, limits=limits) as runner:
            return await work(runner)

    return asyncio.run(all_of_it())
