"""Coroutines in a thread of their own, for a loop that stands still at times."""

import asyncio
import time
from typing import Any

import pytest

from rftmega.environments.tools.background_loop import BackgroundLoop, Handover


def test_all_replies_arrive_with_what_was_raised() -> None:
    async def squared(number: int) -> int:
        await asyncio.sleep(0.001 * (number % 3))
        if number % 10 == 9:
            raise ValueError(number)
        return number**2

    async def asked() -> list[Any]:
        background = BackgroundLoop()
        found = [asyncio.create_task(background.run(squared(number))) for number in range(200)]
        while not all(task.done() for task in found):
            await asyncio.sleep(0)
            time.sleep(0.01)  # as an engine holds the loop up
        replies = await asyncio.gather(*found, return_exceptions=True)
        await background.close()
        return replies

    for number, reply in enumerate(asyncio.run(asked())):
        if number % 10 == 9:
            assert isinstance(reply, ValueError) and reply.args == (number,)
        else:
            assert reply == number**2


def test_a_caller_that_is_cancelled_cancels_the_coroutine() -> None:
    async def asked() -> str:
        background = BackgroundLoop()
        begun, ended = asyncio.Event(), asyncio.Event()
        here, found = asyncio.get_running_loop(), list[str]()

        async def waits() -> None:
            here.call_soon_threadsafe(begun.set)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                found.append("cancelled")
                raise
            finally:
                here.call_soon_threadsafe(ended.set)

        task = asyncio.create_task(background.run(waits()))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(20):
            await ended.wait()
        await background.close()
        return found[0]

    assert asyncio.run(asked()) == "cancelled"


def test_what_is_handed_over_while_a_loop_stands_still_shares_a_wake_up() -> None:
    class Counting(asyncio.SelectorEventLoop):
        woken = 0

        def call_soon_threadsafe(self, *given: Any, **options: Any) -> Any:
            self.woken += 1
            return super().call_soon_threadsafe(*given, **options)

    loop = Counting()
    over, found = Handover(loop), list[int]()
    for number in range(50):
        over(lambda number=number: found.append(number))  # type: ignore[misc]
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert (loop.woken, found) == (1, list(range(50)))
    over(lambda: found.append(50))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert (loop.woken, found[-1]) == (2, 50)
    loop.close()
    over(lambda: found.append(51))  # nobody is there any more
