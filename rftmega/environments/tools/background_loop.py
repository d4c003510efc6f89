"""BackgroundLoop runs coroutines in a thread of their own."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

CLOSING = 20.0  # seconds that what is broken off may take to end
Result = TypeVar("Result")


class Handover:
    """Handover calls functions in the thread of an event loop, from any thread.

    All that are given until the loop comes to them share one wake-up. Each wake-up is a system call
    that gives Python's lock away, and the thread of an engine waits milliseconds to get it back.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._given: deque[Callable[[], Any]] = deque()
        self._woken = False

    def __call__(self, function: Callable[[], Any]) -> None:
        """Has `function` called soon; never where the loop is closed."""
        self._given.append(function)
        if self._woken or self.loop.is_closed():
            return
        self._woken = True
        self.loop.call_soon_threadsafe(self._call_all)

    def _call_all(self) -> None:
        self._woken = False  # first: what comes from now on may find the queue empty already
        while self._given:
            self._given.popleft()()


class BackgroundLoop:
    """BackgroundLoop runs coroutines in an event loop that never stands still.

    The loop of the rollouts is stepped between the steps of an engine. A time limit there would
    strike whenever the engine takes long, although the reply has come.
    """

    def __init__(self) -> None:
        """Starts no thread: the first coroutine does."""
        self._there: Handover | None = None
        self._back: Handover | None = None  # to the loop that asked last

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine to its end. Cancelling the caller cancels the coroutine."""
        there, here = self._started(), asyncio.get_running_loop()
        if self._back is None or self._back.loop is not here:
            self._back = Handover(here)
        back: Handover = self._back
        reply: asyncio.Future[Result] = here.create_future()
        tasks: list[asyncio.Task[Result]] = []

        def begin() -> None:
            if reply.cancelled():
                work.close()
                return
            tasks.append(there.loop.create_task(work))
            tasks[0].add_done_callback(lambda task: back(lambda: _settle(reply, task)))

        there(begin)
        try:
            return await reply
        except asyncio.CancelledError:
            there(lambda: [task.cancel() for task in tasks])
            raise

    async def close(self) -> None:
        """Breaks off what still runs, and ends the thread; one that blocks is left to itself."""
        if self._there is None:
            return
        loop, self._there = self._there.loop, None
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_break_off(), loop))
        loop.call_soon_threadsafe(loop.stop)

    def _started(self) -> Handover:
        if self._there is None:
            loop = asyncio.new_event_loop()
            self._there = Handover(loop)
            # no exit of the process waits for a tool
            threading.Thread(target=loop.run_forever, name="tools", daemon=True).start()
        return self._there


def _settle(reply: asyncio.Future[Result], task: asyncio.Task[Result]) -> None:
    """Gives what came of a task to whoever waits for it, if somebody does."""
    if task.cancelled():
        reply.cancel()
    elif (error := task.exception()) is not None:
        if not reply.done():
            reply.set_exception(error)
    elif not reply.done():
        reply.set_result(task.result())


async def _break_off() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
