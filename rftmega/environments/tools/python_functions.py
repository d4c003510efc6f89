"""Tools that are a user's Python functions, or methods of a class with state."""

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
# methods of a class that the environment calls, hidden from the model
OURS = ("begin", "turn_reward", "rewards", "close")
MAKING = 60.0  # seconds that an object and its begin() may take
CLOSING = 30.0  # seconds that an object's close() may take
MOST_THREADS = 2000  # unfinished threads, per process

_running = 0  # calls in threads
_counting = threading.Lock()


class PythonFunctions:
    """PythonFunctions is a toolset of functions that keep no state per rollout.

    Functions run in threads. Coroutines run in a separate event loop, so that a blocking coroutine
    delays only other coroutines of the user.
    """

    stateful = False

    def __init__(self, references: Sequence[str]):
        """`references`: the functions, each as FILE.py:FUNCTION or MODULE:FUNCTION.

        Raises ConfigError if a function does not exist or no tool spec can be derived from it.
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
        """Cancels running coroutines. Functions that run in threads are abandoned."""
        await self._loop.close()


class FunctionSession(PlainSession):
    """FunctionSession calls functions for one rollout and keeps no state."""

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        schemas: Mapping[str, FunctionSchema],
        loop: BackgroundLoop,
    ):
        """`functions`, `schemas`: the functions and their specs, by the tool's name. `loop`: the
        event loop in which coroutines run.
        """
        self._functions, self._schemas, self._loop = functions, schemas, loop

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        return await reply_of(self._functions[name], self._schemas[name], arguments, self._loop)


class PythonClass:
    """PythonClass is a toolset of the public methods of a class, which is instantiated once per
    rollout.
    """

    stateful = True

    def __init__(self, reference: str):
        """`reference`: the class, as FILE.py:CLASS or MODULE:CLASS.

        Raises ConfigError if the class does not exist, its constructor requires arguments, or it
        has no methods from which tool specs can be derived.
        """
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
        """Cancels running coroutines. Methods that run in threads are abandoned."""
        await self._loop.close()


class ObjectSession:
    """ObjectSession holds one rollout's instance of a user's class and calls its methods."""

    def __init__(
        self,
        made: type,
        schemas: Mapping[str, FunctionSchema],
        loop: BackgroundLoop,
        task: Prompt | None,
    ):
        """`made`: the user's class, instantiated on first use. `schemas`: its methods' specs by
        name. `loop`: the event loop in which coroutines run. `task`: passed to the instance's
        method `begin`, if it has one.
        """
        self._class, self._schemas, self._loop, self._task = made, schemas, loop, task
        self._object: Any = None
        self._making = asyncio.Lock()

    async def ready(self) -> None:
        """Creates the instance. Raises InfrastructureFault if this takes more than MAKING seconds."""
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
        """Returns the result of the instance's method `turn_reward`; None if it has no such method."""
        if not hasattr(self._class, "turn_reward"):
            return None
        worth = await _result((await self._held()).turn_reward, self._loop)
        return None if worth is None else float(worth)

    async def rewards(self) -> dict[str, float]:
        """Returns the result of the instance's method `rewards`; an empty dictionary if it has no
        such method.
        """
        if not hasattr(self._class, "rewards"):
            return {}
        parts = await _result((await self._held()).rewards, self._loop)
        return {name: float(worth) for name, worth in parts.items()}

    async def close(self) -> None:
        """Calls the instance's method `close`, if it has one, and waits for at most CLOSING
        seconds.
        """
        held, self._object = self._object, None
        close = getattr(held, "close", None)
        if close is None:
            return
        try:
            async with asyncio.timeout(CLOSING):
                await _result(close, self._loop)
        except Exception as error:  # of the user's code; the rollout has ended
            log.warning("close() of %s failed.", type(held).__name__, exc_info=error)

    async def _held(self) -> Any:
        """Returns the instance. On the first call, creates it and calls its method `begin`, if it
        has one, with the task.
        """
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
    """Calls a function with the arguments of a tool call and returns its result as text: a string
    unchanged, any other value as JSON.

    `schema` validates the arguments; `loop`: the event loop in which coroutines run. Raises
    ToolError for invalid arguments and any exception of the function except InfrastructureFault.
    """
    try:
        given = schema.read(arguments)
        return await _result(partial(function, **given), loop, told=_text)
    except (ToolError, InfrastructureFault):
        raise
    except Exception as error:  # any error of the function is reported to the model
        log.debug("The tool %s raised an error.", schema.name, exc_info=error)
        raise ToolError(described(error)) from error


def _text(value: Any) -> str:
    """Returns the result of a function as text: a string unchanged, any other value as JSON."""
    if isinstance(value, str):
        return str.__str__(value)  # a plain str, also for a subclass
    return json.dumps(value, ensure_ascii=False, default=str)


async def _result(
    function: Callable[[], Any],
    loop: BackgroundLoop,
    told: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Calls a function in a thread and returns its result, converted by `told`. A returned
    coroutine is awaited in `loop`.

    All user code runs in the thread or in `loop`, including the conversion by `told` of the user's
    objects to text.
    """
    if inspect.iscoroutinefunction(function):  # the call itself runs no user code
        return await loop.run(_contained(function(), told))

    def called() -> Any:
        value = function()
        return value if inspect.isawaitable(value) else told(value)

    value = await in_thread(called)
    return await loop.run(_contained(value, told)) if inspect.isawaitable(value) else value


async def _contained(work: Awaitable[Any], told: Callable[[Any], Any]) -> Any:
    """Awaits `work` and returns its result, converted by `told`. Raises RuntimeError instead of
    SystemExit and KeyboardInterrupt, which would end the event loop.
    """
    try:
        return told(await work)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(described(error, call=True)) from error


async def in_thread(work: Callable[[], Any]) -> Any:
    """Runs `work` in its own daemon thread, which does not delay the exit of the process. Returns
    its result.

    If the caller is cancelled, the thread continues to run, since Python can't end a thread. Raises
    InfrastructureFault if MOST_THREADS calls are running already.
    """
    global _running
    future: Future[Any] = Future()

    def run() -> None:
        global _running
        try:
            outcome, error = work(), None
        except BaseException as raised:  # raised again in the waiting task
            outcome, error = None, raised
            if isinstance(raised, StopIteration) or not isinstance(raised, Exception):
                # futures refuse it, or it would end the loop
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
    """Returns the methods of the class `kind` that a model may call, inherited ones included, by
    name.
    """
    found = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            if inspect.isfunction(value) and not name.startswith("_") and name not in OURS:
                found[name] = value
    return found


def _given_to(kind: Any) -> list[inspect.Parameter]:
    """Returns the parameters of the constructor of the class `kind`, without *args and **kwargs."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    every = inspect.signature(kind).parameters.values()
    return [each for each in every if each.kind not in variadic]
