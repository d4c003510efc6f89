"""Execution of blocking functions in threads, so that they don't block the event loop of the
rollouts.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def in_thread(function: Callable[..., Any], *given: Any) -> Any:
    """Runs a function in its own daemon thread, which does not delay the exit of the process.
    Returns the function's result. `given`: the function's arguments.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # the waiting task was cancelled
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function(*given)
        except SystemExit as raised:  # the run is not the agent's to end
            error = RuntimeError(f"it called sys.exit({raised.code!r})")
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="agent", daemon=True).start()
    return await future
