"""Calls tools within limits."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple

from rftmega.config.options.tools import ToolLimits
from rftmega.core.errors import ConfigError, InfrastructureFault
from rftmega.core.types import Prompt
from rftmega.environments.tools.background_loop import BackgroundLoop
from rftmega.environments.tools.tool import PlainSession, ToolError, ToolSession, Toolset, ToolSpec

LONGEST_PAUSE = 30.0  # seconds between two attempts

Run = Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]]


class ToolReply(NamedTuple):
    """ToolReply is what the model is told of a call."""

    text: str
    failed: bool  # by what the model asked for
    seconds: float  # that the call took, with all its attempts


class OfferedTool(NamedTuple):
    """OfferedTool is a tool, and which of the toolsets it is of."""

    spec: ToolSpec
    toolset: int


class ToolRunner:
    """ToolRunner calls the tools of one rollout, and counts. Use it as a context."""

    def __init__(
        self,
        sessions: Sequence[ToolSession],
        tools: Mapping[str, OfferedTool],
        limits: ToolLimits,
        *,
        run: Run | None = None,
        stateful: Sequence[bool] = (),
    ):
        """Takes a session of each toolset. `run` runs a coroutine where those of the sessions must
        run; None: here. `stateful`: of each session, whether its calls wait for each other.
        """
        self._sessions, self._tools, self._limits = sessions, tools, limits
        self._run: Run = run or _here
        self._turns: list[AbstractAsyncContextManager[Any]] = [
            asyncio.Lock() if waits else nullcontext()
            for waits in stateful or [False] * len(sessions)
        ]
        self.measures = {
            "tool_calls": 0.0,
            "tool_errors": 0.0,  # of the model's
            "tool_retries": 0.0,
            "tool_seconds": 0.0,
        }

    async def __aenter__(self) -> "ToolRunner":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def call(self, name: str, arguments: Any) -> ToolReply:
        """Returns the reply, or what the model did wrong. `arguments`: a JSON object, as read.

        Raises InfrastructureFault where something else than the model failed, after all attempts.
        """
        self.measures["tool_calls"] += 1
        began, failed = time.monotonic(), False
        try:
            tool = self._tool(name)
            given = tool.spec.check(arguments)
            async with self._turns[tool.toolset]:
                began = time.monotonic()  # what others took is not this call's
                text = await self._run(self._attempts(tool, given))
        except ToolError as error:
            text, failed = f"error: {error}", True
            self.measures["tool_errors"] += 1
        finally:
            seconds = time.monotonic() - began
            self.measures["tool_seconds"] += seconds
        return ToolReply(shortened(text, self._limits.characters), failed, seconds)

    def refuse(self) -> None:
        """Counts a call that could not be read, as one that the model did wrong."""
        self.measures["tool_calls"] += 1
        self.measures["tool_errors"] += 1

    async def turn_reward(self) -> float | None:
        """Returns the sum of what tools say that the last answer is worth; None where none says.

        Raises InfrastructureFault where they take too long.
        """
        asked = self._with_own("turn_reward")
        said = await self._asked([session.turn_reward() for session in asked])
        known: list[float] = [worth for worth in said if worth is not None]
        return sum(known) if known else None

    async def rewards(self) -> dict[str, float]:
        """Returns what tools say that the rollout is worth, in named parts.

        Raises InfrastructureFault where they take too long.
        """
        asked = self._with_own("rewards")
        said = await self._asked([session.rewards() for session in asked])
        return {name: worth for parts in said for name, worth in parts.items()}

    async def close(self) -> None:
        """Closes the sessions."""
        if ended := self._with_own("close"):
            await self._run(_close_all(ended))

    def _with_own(self, method: str) -> list[ToolSession]:
        """Returns the sessions that do something in a method which a PlainSession leaves empty: a
        way to another thread and back is not for nothing, once a turn.
        """
        plain = getattr(PlainSession, method)
        return [each for each in self._sessions if getattr(type(each), method) is not plain]

    async def _asked(self, questions: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        if not questions:
            return []
        return await self._run(_within(self._limits.seconds, questions))

    def _tool(self, name: str) -> OfferedTool:
        if name not in self._tools:
            known = ", ".join(self._tools) or "none"
            raise ToolError(f"there is no tool {name!r}; there are: {known}")
        return self._tools[name]

    async def _attempts(self, tool: OfferedTool, arguments: dict[str, Any]) -> str:
        """Makes the call, again where that helps."""
        retries = self._limits.retries if tool.spec.idempotent else 0
        for attempt in range(retries + 1):
            if attempt:
                self.measures["tool_retries"] += 1
                await asyncio.sleep(min(self._limits.pause * 2 ** (attempt - 1), LONGEST_PAUSE))
            try:
                return await self._attempt(tool, arguments)
            except InfrastructureFault:
                if attempt == retries:
                    raise
        raise AssertionError("an attempt returns or raises")

    async def _attempt(self, tool: OfferedTool, arguments: dict[str, Any]) -> str:
        spec = tool.spec
        seconds = spec.seconds or self._limits.seconds
        left = self._limits.rollout_seconds - self.measures["tool_seconds"]
        if left <= 0:
            raise ToolError("the time for tools in this conversation is used up")
        if not spec.late_is_fault:  # what is slow there is not to be told to the model
            seconds = min(seconds, left)
        session = self._sessions[tool.toolset]
        await session.ready()
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await session.call(spec.name, arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            late = f"{spec.name} gave no reply within {seconds:g} s"
            if spec.late_is_fault:
                raise InfrastructureFault(f"The tool {late}.") from error
            raise ToolError(late) from error


class OpenTools:
    """OpenTools holds all tools of a process, and gives each rollout a runner.

    Everything of the toolsets runs in a thread of its own, so it may be used from a loop that
    stands still at times.
    """

    def __init__(self, toolsets: Sequence[Toolset], limits: ToolLimits):
        """Opens nothing yet."""
        self._toolsets, self._limits = toolsets, limits
        self._background = BackgroundLoop()
        self._tools: dict[str, OfferedTool] | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> list[ToolSpec]:
        """Returns all tools. Further calls return the same.

        Raises ConfigError for two tools of one name, InfrastructureFault where a server can't be
        reached; then the next call tries again.
        """
        async with self._opening:
            if self._tools is None:
                self._tools = offered(await self._background.run(_open_all(self._toolsets)))
        return [tool.spec for tool in self._tools.values()]

    def runner(self, task: Prompt | None = None) -> ToolRunner:
        """Returns the runner of one rollout. Raises RuntimeError before `open`."""
        if self._tools is None:
            raise RuntimeError("open() comes first")
        sessions = [toolset.session(task) for toolset in self._toolsets]
        stateful = [toolset.stateful for toolset in self._toolsets]
        return ToolRunner(
            sessions, self._tools, self._limits, run=self._background.run, stateful=stateful
        )

    async def close(self) -> None:
        """Ends servers, processes and the thread. `open` begins anew."""
        await self._background.run(_close_all(self._toolsets))
        await self._background.close()
        self._tools = None


def offered(specs: Sequence[Sequence[ToolSpec]]) -> dict[str, OfferedTool]:
    """Returns name -> tool of the tools of each toolset.

    Raises ConfigError for a name that two of them have.
    """
    found: dict[str, OfferedTool] = {}
    for place, tools in enumerate(specs):
        for spec in tools:
            if spec.name in found:
                raise ConfigError(
                    f"environment: two tools have the name {spec.name}. Rename one, or leave one out."
                )
            found[spec.name] = OfferedTool(spec, place)
    return found


def shortened(text: str, most: int) -> str:
    """Returns a text of at most `most` characters, without its middle and with a note of that
    where it is longer; the note comes on top. What is no Unicode is replaced.
    """
    text = text.encode(errors="replace").decode()
    if len(text) <= most:
        return text
    head = (most + 1) // 2
    tail = most - head
    note = f"\n[... {len(text) - most} characters left out ...]\n"
    return text[:head] + note + (text[-tail:] if tail else "")


async def _here(work: Coroutine[Any, Any, Any]) -> Any:
    return await work


async def _within(seconds: float, questions: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    try:
        async with asyncio.timeout(seconds):
            return list(await asyncio.gather(*questions))
    except TimeoutError as error:
        raise InfrastructureFault(
            f"The tools did not tell their rewards within {seconds:g} s."
        ) from error


async def _open_all(toolsets: Sequence[Toolset]) -> list[Sequence[ToolSpec]]:
    return list(await asyncio.gather(*(toolset.open() for toolset in toolsets)))


async def _close_all(closed: Sequence[ToolSession] | Sequence[Toolset]) -> None:
    await asyncio.gather(*(each.close() for each in closed))
