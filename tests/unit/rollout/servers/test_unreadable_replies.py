"""Messages of a server that can't be read, or are nobody's: the requests go elsewhere at once."""

import asyncio
import random
import time
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from websockets.asyncio.server import ServerConnection as Served
from websockets.asyncio.server import serve

from rftmega.core.errors import EngineError, EngineFault
from rftmega.rollout.servers import connection as connection_module
from rftmega.rollout.servers.connection import Disconnected, ServerConnection
from rftmega.rollout.servers.protocol.completion_checks import CompletionLimits
from rftmega.rollout.servers.protocol.server_replies import answered
from rftmega.rollout.servers.server_client import ServerClient
from rftmega.rollout.servers.vllm import protocol

HANG = object()


def right(number: int, token: int = 5) -> protocol.ServerReply:
    logprobs = array("f", [-0.5] * 2).tobytes()
    return protocol.ServerReply(
        number, protocol.integers([token] * 2), logprobs, "length", [("1", 0, 2)]
    )


def other_prompt(number: int) -> int:
    return protocol.renumbered(number, [7, 7])


BROKEN: dict[str, Callable[[int], Any]] = {
    "junk": lambda number: b"\xff\xc1junk",
    "text": lambda number: "hello",
    "nothing": lambda number: b"",
    "half": lambda number: protocol.packed([right(number)])[:-3],
    "something behind it": lambda number: protocol.packed([right(number)]) + b"x",
    "an unknown tag": lambda number: b"\x91\x93\x07\x01\x02",
    "no list": lambda number: b"\xc0",
    "a reason that is no text": lambda number: protocol.packed([right(number)]).replace(
        b"length", b"\xff" * 6
    ),
    "lists without an end": lambda number: b"\x91" * 100_000,
    "an unknown number": lambda number: protocol.packed([right(10**6), right(-1)]),
    "a request's before this one": lambda number: protocol.packed([right(number - (1 << 32))]),
    "the answer to another prompt": lambda number: protocol.packed([right(other_prompt(number))]),
    "two answers to one request": lambda number: protocol.packed([right(number), right(number, 9)]),
}


async def served(
    reply: Callable[[int], Any], work: Callable[[ServerClient, ServerConnection], Any]
) -> Any:
    """Does `work` with a server that replies so to each request."""

    async def handle(socket: Served) -> None:
        async for message in socket:
            for said in protocol.asked(message):
                if isinstance(said, protocol.Ask) and (told := reply(said.number)) is not HANG:
                    await socket.send(told)

    async with serve(handle, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        client = ServerClient(f"http://127.0.0.1:{port}", {})
        connection = client.connections().socket
        try:
            async with asyncio.timeout(60):
                return await work(client, connection)
        finally:
            await connection.close()
            await connection.close()


@pytest.mark.parametrize("what", BROKEN)
def test_who_waits_is_told_at_once_and_the_next_request_has_a_new_connection(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "CLOSE_SECONDS", 0.1)
    broken = True

    def reply(number: int) -> Any:
        return BROKEN[what](number) if broken else protocol.packed([right(number)])

    async def work(client: ServerClient, connection: ServerConnection) -> None:
        nonlocal broken
        begin = time.monotonic()
        asked = [connection.ask([n, 2], {}) for n in range(20)]
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert any(isinstance(each, Disconnected) for each in told)
        if what != "two answers to one request":  # the first one of them may be read
            assert all(isinstance(each, Disconnected) for each in told), told
            connections = client.connections()
            with pytest.raises(EngineFault, match="sent what is no answer"):
                await client.ask(connections, [1, 2], {}, 3600.0)
            await connections.close()
        assert time.monotonic() - begin < 30
        broken = False
        assert (await connection.ask([1, 2], {})).reason == "length"

    asyncio.run(served(reply, work))


def test_an_answer_to_a_request_that_was_taken_back_disturbs_nobody() -> None:
    asked: list[int] = []

    def reply(number: int) -> Any:
        asked.append(number)
        if len(asked) == 1:
            return HANG
        return protocol.packed([right(number) for number in asked])

    async def work(client: ServerClient, connection: ServerConnection) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await connection.ask([1, 2], {})
        assert (await connection.ask([3, 4], {})).number == asked[1]

    asyncio.run(served(reply, work))


def test_an_engine_that_mixes_prompts_up_is_noticed() -> None:
    """The server numbers its answer by the prompt that its engine says it answered."""
    prompt = protocol.integers([1, 2])
    number = protocol.numbered(7, prompt)
    assert protocol.renumbered(number, [1, 2]) == number
    others = [[1, 3], [2, 1], [], [1, 2, 0], [1]]
    numbers = {protocol.renumbered(number, other) for other in others}
    assert len(numbers) == len(others) and number not in numbers
    assert len({protocol.numbered(n, prompt) for n in range(1000)}) == 1000


def test_of_2000_mutated_messages_each_is_read_or_an_error_of_ours() -> None:
    random_of = random.Random(11)
    limits = CompletionLimits(8, 100, frozenset({1}), other_stops=False)
    plain = protocol.packed([right(3), protocol.Failure(4, "why", True), right(5, 9)])
    read = 0
    for _ in range(2000):
        message = spoilt(plain, random_of)
        try:
            for each in protocol.answered(message):
                if isinstance(each, protocol.ServerReply):
                    found = answered(each, limits=limits)
                    assert all(0 <= token < 100 for token in found.token_ids)
                    assert len(found.token_ids) == len(found.of_tokens) <= 8
            read += 1
        except (protocol.ProtocolError, EngineError):
            pass
    assert read < 1500


def test_of_2000_mutated_requests_each_is_read_or_none() -> None:
    random_of = random.Random(12)
    plain = protocol.packed(
        [protocol.Ask(3, protocol.integers([1, 2]), {"seed": 1}), protocol.Cancel(3)]
    )
    for _ in range(2000):
        try:
            said = protocol.asked(spoilt(plain, random_of))
        except protocol.ProtocolError:
            continue
        assert all(isinstance(each, protocol.Ask | protocol.Cancel) for each in said)


def spoilt(plain: bytes, random_of: random.Random) -> bytes:
    """Returns bytes that are cut off, changed, doubled or other values in their place."""
    message = bytearray(plain)
    for _ in range(random_of.randint(1, 3)):
        place = random_of.randrange(len(message) or 1)
        kind = random_of.randrange(5)
        if kind == 0:
            del message[place:]
        elif kind == 1 and message:
            message[place] = random_of.randrange(256)
        elif kind == 2:
            message[place:place] = random_of.randbytes(random_of.randint(1, 9))
        elif kind == 3:
            message[place:place] = msgspec.msgpack.encode(
                random_of.choice([None, -1, 2**63, 1.5, "x", [], {}, b"", [[[]]]])
            )
        else:
            message += message[place:]
    return bytes(message)
