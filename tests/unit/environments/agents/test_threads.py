"""Blocking functions beside the loop of the rollouts: what they give, and what they raise."""

import asyncio
import sys

import pytest

from rftmega.environments.agents.threads import in_thread


def test_what_a_function_gives_or_raises_is_given_or_raised_where_it_is_awaited() -> None:
    assert asyncio.run(in_thread(lambda a: a + 1, 2)) == 3
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(lambda: 1 / 0))


def test_a_function_that_ends_its_program_fails_and_nobody_waits_for_it() -> None:
    async def asked() -> None:
        async with asyncio.timeout(20):
            await in_thread(sys.exit, 3)

    with pytest.raises(RuntimeError, match=r"it called sys.exit\(3\)"):
        asyncio.run(asked())
