"""Python functions of a user's own as tools, and classes whose methods are tools with a state."""

import asyncio
import inspect
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rftmega.config.user_code.functions import function_of, name_of
from rftmega.core.errors import ConfigError, InfrastructureFault, described
from rftmega.core.types import Prompt
from rftmega.environments.tools.background_loop import BackgroundLoop
from rftmega.environments.tools.function_schema import OPTION, FunctionSchema
from rftmega.environments.tools.tool import PlainSession, ToolError, ToolSpec

log = logging.getLogger(__name__)
# methods of a class that the environment calls, and no model
OURS = ("begin", "turn_reward", "rewards", "close")
MAKING = 60.0  # seconds that an object and its begin() may take
CLOSING = 30.0  # seconds that an object's close() may take
MOST_THREADS = 2000  # that have not ended, in one process

_running = 0  # calls in threads
_counting = threading.Lock()


class PythonFunctions:
    """PythonFunctions is a toolset of functions without a state.

    Functions run in threads, coroutines in a loop of their own: one that blocks holds up other
    coroutines of the user's, and nothing else.
    """

    stateful = False

    def __init__(self, references: Sequence[str]):
        """`references`: FILE.py:FUNCTION or MODULE:FUNCTION.

        Raises ConfigError where there is none, or one that can't be told to a model.
        """
        self.names = [name_of(reference) for reference in references]
        self._functions = {name_of(each): function_of(each, OPTION) for each in references}
        self._schemas = {
            name: FunctionSchema(function, name) for name, function in self._functions.items()
        }
        self._loop = BackgroundLoop()

    async def open(self) -> list[ToolSpec]:
        return [schema.spec for schema in self._schemas.values()]

    def session(self, task: Prompt | None = None) -> "FunctionSession":
        return FunctionSession(self._functions, self._schemas, self._loop)

    async def close(self) -> None:
        """Breaks off coroutines; functions that still run are left to themselves."""
        await self._loop.close()


class FunctionSession(PlainSession):
    """FunctionSession calls functions, and keeps nothing."""

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        schemas: Mapping[str, FunctionSchema],
        loop: BackgroundLoop,
    ):
        """`loop` runs coroutines."""
        self._functions, self._schemas, self._loop = functions, schemas, loop

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        return await reply_of(self._functions[name], self._schemas[name], arguments, self._loop)


class PythonClass:
    """PythonClass is a toolset of the public methods of a class, of which each rollout has an
    object.
    """

    stateful = True

    def __init__(self, reference: str):
        """Raises ConfigError where there is no such class, or it has no method to tell a model of."""
        named: Any = function_of(reference, OPTION)
        self._class: type = named
        if any(each.default is each.empty for each in _given_to(self._class)):
            raise ConfigError(
                f"{OPTION}: {reference} must be a class that is called without arguments, once a rollout."
            )
        methods = public_methods(self._class)
        if not methods:
            raise ConfigError(f"{OPTION}: {reference} has no public methods.")
        self.names = list(methods)
        self._schemas = {
            name: FunctionSchema(method, name, bound=True) for name, method in methods.items()
        }
        self._loop = BackgroundLoop()

    async def open(self) -> list[ToolSpec]:
        return [schema.spec for schema in self._schemas.values()]

    def session(self, task: Prompt | None = None) -> "ObjectSession":
        return ObjectSession(self._class, self._schemas, self._loop, task)

    async def close(self) -> None:
        """Breaks off coroutines; methods that still run are left to themselves."""
        await self._loop.close()


class ObjectSession:
    """ObjectSession is one rollout's object of a class."""

    def __init__(
        self,
        made: type,
        schemas: Mapping[str, FunctionSchema],
        loop: BackgroundLoop,
        task: Prompt | None,
    ):
        """The object is made when something is asked of it. `loop` runs coroutines."""
        self._class, self._schemas, self._loop, self._task = made, schemas, loop, task
        self._object: Any = None
        self._making = asyncio.Lock()

    async def ready(self) -> None:
        """Makes the object. Raises InfrastructureFault where that takes too long."""
        try:
            async with asyncio.timeout(MAKING):
                await self._held()
        except TimeoutError as error:
            raise InfrastructureFault(
                f"{OPTION}: no object of {self._class.__name__} was made within {MAKING:g} s."
            ) from error

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        method = getattr(await self._held(), name)
        return await reply_of(method, self._schemas[name], arguments, self._loop)

    async def turn_reward(self) -> float | None:
        """Asks the object's own `turn_reward`, where it has one."""
        if not hasattr(self._class, "turn_reward"):
            return None
        worth = await _result((await self._held()).turn_reward, self._loop)
        return None if worth is None else float(worth)

    async def rewards(self) -> dict[str, float]:
        """Asks the object's own `rewards`, where it has one."""
        if not hasattr(self._class, "rewards"):
            return {}
        parts = await _result((await self._held()).rewards, self._loop)
        return {name: float(worth) for name, worth in parts.items()}

    async def close(self) -> None:
        """Calls the object's own `close`, where it has one, for at most CLOSING seconds."""
        held, self._object = self._object, None
        close = getattr(held, "close", None)
        if close is None:
            return
        try:
            async with asyncio.timeout(CLOSING):
                await _result(close, self._loop)
        except Exception as error:  # the object's own; the rollout has ended
            log.warning("close() of %s failed.", type(held).__name__, exc_info=error)

    async def _held(self) -> Any:
        """Returns the object, which hears the task first where it has a method `begin`."""
        async with self._making:
            if self._object is None:
                made = await in_thread(self._class)
                if self._task is not None and hasattr(made, "begin"):
                    await _result(partial(made.begin, self._task), self._loop)
                self._object = made
            return self._object


async def reply_of(
    function: Callable[..., Any],
    schema: FunctionSchema,
    arguments: dict[str, Any],
    loop: BackgroundLoop,
) -> str:
    """Calls a function and returns what it returns as text: text as it is, all else as JSON.

    Raises ToolError with what it raises, but for InfrastructureFault.
    """
    try:
        given = schema.read(arguments)
        return await _result(partial(function, **given), loop, told=_text)
    except (ToolError, InfrastructureFault):
        raise
    except Exception as error:  # the function's own, whatever it is: the model is told
        log.debug("The tool %s raised an error.", schema.name, exc_info=error)
        raise ToolError(described(error)) from error


def _text(value: Any) -> str:
    """Returns what a function returned as text: text as it is, all else as JSON."""
    if isinstance(value, str):
        return str.__str__(value)  # of a class of its own, without its methods
    return json.dumps(value, ensure_ascii=False, default=str)


async def _result(
    function: Callable[[], Any],
    loop: BackgroundLoop,
    told: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Calls a function in a thread, and `told` with what it returns. Waits in `loop` for a coroutine
    that it returns. Nothing of the user's runs elsewhere, the text of its objects included.
    """
    if inspect.iscoroutinefunction(function):  # the call runs nothing of the user's yet
        return await loop.run(_contained(function(), told))

    def called() -> Any:
        value = function()
        return value if inspect.isawaitable(value) else told(value)

    value = await in_thread(called)
    return await loop.run(_contained(value, told)) if inspect.isawaitable(value) else value


async def _contained(work: Awaitable[Any], told: Callable[[Any], Any]) -> Any:
    """Waits, and raises RuntimeError for what would end the loop."""
    try:
        return told(await work)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(described(error, call=True)) from error


async def in_thread(work: Callable[[], Any]) -> Any:
    """Runs `work` in a thread of its own, which no exit of the process waits for.

    Cancelled, it leaves the thread to itself: Python can't end one. Raises InfrastructureFault
    where very many have not ended.
    """
    global _running
    future: Future[Any] = Future()

    def run() -> None:
        global _running
        try:
            outcome, error = work(), None
        except BaseException as raised:  # raised again where somebody waits for it
            outcome, error = None, raised
            if isinstance(raised, StopIteration) or not isinstance(raised, Exception):
                # no future takes it, or it would end the loop
                error = RuntimeError(described(raised, call=True))
        with _counting:
            _running -= 1
        if not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(outcome)
        else:
            future.set_exception(error)

    with _counting:
        if _running >= MOST_THREADS:
            raise InfrastructureFault(
                f"{_running} calls of Python tools have not ended: nothing can end a thread. Give the functions that hang "
                "a time limit of their own."
            )
        _running += 1
    threading.Thread(target=run, name="python tool", daemon=True).start()
    return await asyncio.wrap_future(future)


def public_methods(kind: type) -> dict[str, Any]:
    """Returns name -> function of the methods that a model may call, those of bases included."""
    found = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            if inspect.isfunction(value) and not name.startswith("_") and name not in OURS:
                found[name] = value
    return found


def _given_to(kind: Any) -> list[inspect.Parameter]:
    """Returns the parameters that a class is called with."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    every = inspect.signature(kind).parameters.values()
    return [each for each in every if each.kind not in variadic]
