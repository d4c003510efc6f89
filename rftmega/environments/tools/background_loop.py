"""BackgroundLoop runs coroutines in an event loop in its own thread."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

CLOSING = 20.0  # seconds that cancelled tasks may take to end
Result = TypeVar("Result")


class Handover:
    """Handover schedules calls of functions in the thread of an event loop, from any thread.

    All functions that are scheduled before the loop runs them share one wake-up of the loop. Each
    wake-up is a system call that releases Python's GIL, and the engine's thread waits milliseconds
    to reacquire the GIL.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._given: deque[Callable[[], Any]] = deque()
        self._woken = False

    def __call__(self, function: Callable[[], Any]) -> None:
        """Schedules a call of `function` in the thread of the event loop. Does nothing if the loop
        is closed.
        """
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
    """BackgroundLoop runs coroutines in an event loop that runs continuously.

    The event loop of the rollouts runs only between the steps of an engine. A timeout in that loop
    would expire whenever a step is slow, even if the awaited reply has arrived.
    """

    def __init__(self) -> None:
        """Starts no thread; the first call of `run` does."""
        self._there: Handover | None = None
        self._back: Handover | None = None  # to the last caller's loop

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine in the background loop and returns its result. Cancelling the caller
        cancels the coroutine.
        """
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
        """Cancels running coroutines and ends the thread. If the thread is blocked for more than
        CLOSING seconds, does not wait for it any longer.
        """
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
            # a daemon thread: tools don't delay the exit of the process
            threading.Thread(target=loop.run_forever, name="tools", daemon=True).start()
        return self._there


def _settle(reply: asyncio.Future[Result], task: asyncio.Task[Result]) -> None:
    """Copies the result or exception of a finished task to the future `reply`, on which the caller
    waits, unless that is done.
    """
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
