"""Execution of tool calls under time and size limits."""

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
    """ToolReply is the reply to a call, as returned to the model."""

    text: str
    failed: bool  # because of the model's request
    seconds: float  # duration of the call, with all its attempts


class OfferedTool(NamedTuple):
    """OfferedTool is a tool that the model may call: its spec, and the index of the toolset that
    the tool belongs to.
    """

    spec: ToolSpec
    toolset: int


class ToolRunner:
    """ToolRunner runs the tool calls of one rollout, and counts calls, errors, retries and seconds
    in `measures`.

    Used as a context manager, it closes the sessions at the end.
    """

    def __init__(
        self,
        sessions: Sequence[ToolSession],
        tools: Mapping[str, OfferedTool],
        limits: ToolLimits,
        *,
        run: Run | None = None,
        stateful: Sequence[bool] = (),
    ):
        """`sessions`: one session of each toolset; `tools`: the tools by name; `limits`: time and
        size limits.

        `run` executes a coroutine in the event loop of the sessions; None: in the caller's.
        `stateful`: for each session, whether its calls must run one at a time.
        """
        self._sessions, self._tools, self._limits = sessions, tools, limits
        self._run: Run = run or _here
        self._turns: list[AbstractAsyncContextManager[Any]] = [
            asyncio.Lock() if waits else nullcontext()
            for waits in stateful or [False] * len(sessions)
        ]
        self.measures = {
            "tool_calls": 0.0,
            "tool_errors": 0.0,  # errors of the model
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
        """Runs a call of the tool `name` and returns its reply, or an error message if the model is
        at fault.

        `arguments`: the parsed JSON of the call. Raises InfrastructureFault if the last permitted
        attempt failed through no fault of the model.
        """
        self.measures["tool_calls"] += 1
        began, failed = time.monotonic(), False
        try:
            tool = self._tool(name)
            given = tool.spec.check(arguments)
            async with self._turns[tool.toolset]:
                began = time.monotonic()  # excludes the wait for other calls
                text = await self._run(self._attempts(tool, given))
        except ToolError as error:
            text, failed = f"error: {error}", True
            self.measures["tool_errors"] += 1
        finally:
            seconds = time.monotonic() - began
            self.measures["tool_seconds"] += seconds
        return ToolReply(shortened(text, self._limits.characters), failed, seconds)

    def refuse(self) -> None:
        """Counts a call that could not be parsed as an error of the model."""
        self.measures["tool_calls"] += 1
        self.measures["tool_errors"] += 1

    async def turn_reward(self) -> float | None:
        """Returns the sum of the tools' rewards for the last turn; None if no tool has one.

        Raises InfrastructureFault if the tools take too long.
        """
        asked = self._with_own("turn_reward")
        said = await self._asked([session.turn_reward() for session in asked])
        known: list[float] = [worth for worth in said if worth is not None]
        return sum(known) if known else None

    async def rewards(self) -> dict[str, float]:
        """Returns the tools' reward components of the rollout by name.

        Raises InfrastructureFault if the tools take too long.
        """
        asked = self._with_own("rewards")
        said = await self._asked([session.rewards() for session in asked])
        return {name: worth for parts in said for name, worth in parts.items()}

    async def close(self) -> None:
        """Closes all sessions of the rollout."""
        if ended := self._with_own("close"):
            await self._run(_close_all(ended))

    def _with_own(self, method: str) -> list[ToolSession]:
        """Returns the sessions whose class overrides the method of PlainSession called `method`.
        Other sessions need no call, which would switch to another thread every turn.
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
        """Runs a call and returns the tool's reply as text. Repeats an idempotent call after an
        InfrastructureFault, up to the limit `retries`.
        """
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
        if not spec.late_is_fault:  # tools whose timeouts are faults get their full time
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
    """OpenTools holds all toolsets of a process and creates a ToolRunner for each rollout.

    Its event loop runs in a separate thread, so that tools continue to work while the caller's
    event loop does not run.
    """

    def __init__(self, toolsets: Sequence[Toolset], limits: ToolLimits):
        """Stores the toolsets and the limits of their calls; opens no toolset yet."""
        self._toolsets, self._limits = toolsets, limits
        self._background = BackgroundLoop()
        self._tools: dict[str, OfferedTool] | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> list[ToolSpec]:
        """Opens all toolsets on the first call, and returns the specs of their tools.

        Raises ConfigError if two tools have the same name, InfrastructureFault if a server can't be
        reached; the next call then tries again.
        """
        async with self._opening:
            if self._tools is None:
                self._tools = offered(await self._background.run(_open_all(self._toolsets)))
        return [tool.spec for tool in self._tools.values()]

    def runner(self, task: Prompt | None = None) -> ToolRunner:
        """Returns the ToolRunner for the rollout of a task. Raises RuntimeError if `open` was not
        called before.
        """
        if self._tools is None:
            raise RuntimeError("open() comes first")
        sessions = [toolset.session(task) for toolset in self._toolsets]
        stateful = [toolset.stateful for toolset in self._toolsets]
        return ToolRunner(
            sessions, self._tools, self._limits, run=self._background.run, stateful=stateful
        )

    async def close(self) -> None:
        """Ends all servers and processes of the tools, and the thread. `open` can start them again."""
        await self._background.run(_close_all(self._toolsets))
        await self._background.close()
        self._tools = None


def offered(specs: Sequence[Sequence[ToolSpec]]) -> dict[str, OfferedTool]:
    """Returns the tools of all toolsets by name.

    `specs`: for each toolset, the specs of its tools. Raises ConfigError if two tools have the same
    name.
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
    """Returns a text of at most `most` characters unchanged; of a longer one, its first and last
    characters, `most` in total, with a note between them.

    Replaces invalid Unicode.
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
