"""Requests and completions over one WebSocket, with uvicorn between them, as vLLM's server has it."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn

from rftmega.core.errors import EngineError
from rftmega.core.expert_routes import RoutedModel
from rftmega.rollout.servers.connection import CompletionRefused, Disconnected, ServerConnection
from rftmega.rollout.servers.protocol.server_replies import answered
from rftmega.rollout.servers.vllm import auth, completions_socket, protocol
from rftmega.rollout.servers.vllm.completions_socket import CompletionsSocket
from rftmega.runtime.parallel import orphans

pytest.importorskip("vllm")
SAMPLING = {"temperature": 1.0, "max_tokens": 8}
FOREVER, BAD, BROKEN, ODD = 99, 98, 97, 96  # first tokens of special requests


class Engine:
    """Answers with the prompt's tokens, each under a log-prob of -token."""

    def __init__(self) -> None:
        self.asked, self.salts, self.ended = list[list[int]](), list[str | None](), list[int]()
        self.adapters = list[int]()

    async def generate(
        self, prompt: Any, parameters: Any, name: str, *, lora_request: Any
    ) -> AsyncIterator[Any]:
        ids = prompt["prompt_token_ids"]
        self.asked.append(ids)
        self.salts.append(prompt.get("cache_salt"))
        self.adapters.append(lora_request.lora_int_id if lora_request else 0)
        if ids[0] == BAD:
            raise ValueError("no such token")
        if ids[0] == BROKEN:
            raise RuntimeError("out of order")
        try:
            await asyncio.sleep(3600 if ids[0] == FOREVER else 0.001)
        finally:
            self.ended.append(ids[0])
        logprobs = [{token: SimpleNamespace(logprob=-float(token))} for token in ids]
        if ids[0] == ODD:
            logprobs.pop()
        spans = [SimpleNamespace(version="3", start=0, end=len(ids))]
        choice = SimpleNamespace(
            token_ids=ids,
            logprobs=logprobs,
            weight_versions=spans,
            finish_reason="stop",
            routed_experts=routes_of(ids),
        )
        yield SimpleNamespace(outputs=[choice], prompt_token_ids=ids)


def routes_of(ids: list[int]) -> Any:
    """As vLLM tells them, of two layers and two experts a token: what it is fed, once the prompt and
    once the answer; nothing of prompts of one token.
    """
    fed = [*ids, *ids][:-1]
    return np.array([[[7, 7], [n, n + 1]] for n in fed], np.uint8) if len(ids) > 1 else None


class Served:
    """A server with the run's door; `messages` counts what comes in."""

    def __init__(self) -> None:
        self.engine, self.messages = Engine(), 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted() -> Any:
            self.messages += 1
            return await receive()

        state = SimpleNamespace(engine_client=self.engine)
        application = SimpleNamespace(state=state)
        await auth.Authentication(_lifespan)(scope | {"app": application}, counted, send)


async def _lifespan(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, str]]:
    monkeypatch.setenv(auth.KEY, "the key")
    monkeypatch.delenv(orphans.PARENT, raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    application = Served()
    server = uvicorn.Server(uvicorn.Config(application, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield application, f"http://127.0.0.1:{port}"
    server.should_exit = server.force_exit = True
    thread.join()


def within(address: str, work: Callable[[ServerConnection], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        connection = ServerConnection(address, auth.headers("the key"))
        try:
            async with asyncio.timeout(30):
                return await work(connection)
        finally:
            await connection.close()

    return asyncio.run(run())


def test_each_request_gets_its_own_answer_and_many_travel_together(
    served: tuple[Served, str],
) -> None:
    application, address = served
    prompts = [[number % 90 + 1, 5, 7] for number in range(300)]

    async def work(connection: ServerConnection) -> list[protocol.ServerReply]:
        return await asyncio.gather(*(connection.ask(ids, SAMPLING) for ids in prompts))

    replies = within(address, work)
    for ids, reply in zip(prompts, replies, strict=True):
        assert protocol.numbers("i", reply.token_ids).tolist() == ids
        assert protocol.numbers("f", reply.logprobs).tolist() == [-float(token) for token in ids]
        assert reply.spans == [("3", 0, 3)] and reply.reason == "stop"
    assert application.messages < 20, "the requests came one by one"


def test_routes_come_with_the_tokens_and_others_than_those_of_the_tokens_are_refused(
    served: tuple[Served, str],
) -> None:
    _, address = served
    reply = within(address, lambda connection: connection.ask([4, 9, 2], SAMPLING))
    model = RoutedModel(layers=(1,), experts=16, active=2)
    known = answered(reply, model, context=3).routes
    assert known is not None and known.dtype == torch.uint8
    assert known[:, 0].tolist() == [[n, n + 1] for n in (4, 9, 2, 4, 9)]
    assert answered(reply).routes is None, "nobody asked"
    with pytest.raises(EngineError, match=r"routes of shape \(5, 2, 2\). Of 6 tokens"):
        answered(reply, model, context=4)
    with pytest.raises(EngineError, match="experts 2 to 10; there are 10"):
        answered(reply, model._replace(experts=10), context=3)
    silent = within(address, lambda connection: connection.ask([4], SAMPLING))
    with pytest.raises(EngineError, match="routes of shape"):
        answered(silent, model, context=1)


def test_large_answers_go_in_several_messages(
    served: tuple[Served, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions_socket, "MESSAGE", 50)  # bytes; an answer's routes are 20
    sizes = list[int]()
    real = protocol.packed
    monkeypatch.setattr(protocol, "packed", lambda said: sizes.append(len(said)) or real(said))
    _, address = served

    async def work(connection: ServerConnection) -> list[protocol.ServerReply]:
        return await asyncio.gather(*(connection.ask([n, 5, 7], SAMPLING) for n in range(1, 41)))

    replies = within(address, work)
    assert [protocol.numbers("i", each.token_ids)[0] for each in replies] == list(range(1, 41))
    told = [size for size in sizes if size != 40]
    assert max(told) <= 3 and sum(told) >= 40


def test_a_request_names_its_adapter(served: tuple[Served, str]) -> None:
    application, address = served
    within(address, lambda connection: connection.ask([4], SAMPLING, adapter=2))
    within(address, lambda connection: connection.ask([4], SAMPLING))
    assert application.engine.adapters == [2, 0]


def test_a_salt_keeps_caches_apart(served: tuple[Served, str]) -> None:
    application, address = served
    within(address, lambda connection: connection.ask([4], SAMPLING, salt="2"))
    within(address, lambda connection: connection.ask([4], SAMPLING))
    assert application.engine.salts == ["2", None]


def test_a_cancelled_request_ends_in_the_server_and_others_go_on(
    served: tuple[Served, str],
) -> None:
    application, address = served

    async def work(connection: ServerConnection) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await connection.ask([FOREVER], SAMPLING)
        await connection.ask([4], SAMPLING)
        while FOREVER not in application.engine.ended:
            await asyncio.sleep(0.01)

    within(address, work)


def test_what_is_unanswered_when_the_connection_goes_ends_in_the_server(
    served: tuple[Served, str],
) -> None:
    application, address = served

    async def work(connection: ServerConnection) -> None:
        waiting = asyncio.create_task(connection.ask([FOREVER], SAMPLING))
        while not application.engine.asked:
            await asyncio.sleep(0.01)
        await connection.close()
        with pytest.raises(Disconnected):
            await waiting
        reply = await connection.ask([4], SAMPLING)  # over a new one
        assert protocol.numbers("i", reply.token_ids).tolist() == [4]
        while FOREVER not in application.engine.ended:
            await asyncio.sleep(0.01)

    within(address, work)


def test_a_refused_request_is_told_from_a_server_that_fails(served: tuple[Served, str]) -> None:
    _, address = served
    with pytest.raises(CompletionRefused, match="no such token"):
        within(address, lambda connection: connection.ask([BAD], SAMPLING))
    for token, said in ((BROKEN, "out of order"), (ODD, "zip")):  # what it gave is no completion
        with pytest.raises(EngineError, match=said) as raised:
            within(address, lambda connection, token=token: connection.ask([token], SAMPLING))
        assert not isinstance(raised.value, CompletionRefused)


def test_nobody_comes_in_without_the_key_and_nobody_waits_for_a_server_that_is_not_there(
    served: tuple[Served, str],
) -> None:
    application, address = served

    async def ask(address: str, key: str) -> None:
        await ServerConnection(address, auth.headers(key)).ask([4], SAMPLING)

    with pytest.raises(Disconnected, match="can't be reached"):
        asyncio.run(ask(address, "another"))
    with pytest.raises(Disconnected, match="can't be reached"):
        asyncio.run(ask("http://127.0.0.1:9", "the key"))
    assert not application.engine.asked


def test_something_else_than_a_message_of_ours_is_no_request() -> None:
    sent: list[Any] = []
    told = iter(
        [{"type": "websocket.connect"}, {"type": "websocket.receive", "bytes": b"\x93\x01"}]
    )

    async def receive() -> Any:
        return next(told)

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises(protocol.ProtocolError):
        asyncio.run(CompletionsSocket(Engine(), receive, send).serve())
    assert [message["type"] for message in sent] == ["websocket.accept"]
