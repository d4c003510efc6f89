"""BackgroundLoop runs coroutines in a thread of their own."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

CLOSING = 20.0  # seconds that what is broken off may take to end
Result = TypeVar("Result")


class BackgroundLoop:
    """BackgroundLoop runs coroutines in an event loop that never stands still.

    The loop of the rollouts is stepped between the steps of an engine. A time limit there would
    strike whenever the engine takes long, although the reply has come.
    """

    def __init__(self) -> None:
        """Starts no thread: the first coroutine does."""
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine to its end. Cancelling the caller cancels the coroutine."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # no exit of the process waits for a tool
            threading.Thread(target=self._loop.run_forever, name="tools", daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def close(self) -> None:
        """Breaks off what still runs, and ends the thread; one that blocks is left to itself."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_break_off(), loop))
        loop.call_soon_threadsafe(loop.stop)


async def _break_off() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
