"""Replies that are of a proxy, a login page or half a file: each is the fault of its server alone."""

import asyncio
import gzip
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rftmega.core.errors import EngineError, EngineFault
from rftmega.rollout.servers.protocol import http_reply
from rftmega.rollout.servers.protocol.completion_checks import CompletionLimits
from rftmega.rollout.servers.protocol.server_replies import answered
from rftmega.rollout.servers.server_client import ServerClient
from rftmega.rollout.servers.server_group import ServerGroup
from rftmega.rollout.servers.sglang_client import SGLangClient
from rftmega.rollout.servers.stock_client import StockClient
from rftmega.rollout.servers.vllm import protocol

SAMPLING: dict[str, Any] = {
    "max_tokens": 4,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": 1,
    "stop_token_ids": [1],
}
VLLM: dict[str, Any] = {
    "choices": [
        {
            "token_ids": [4, 1],
            "finish_reason": "stop",
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
            "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        }
    ]
}
SGLANG: dict[str, Any] = {
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 4, None], [-0.25, 1, "x"]],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
}
BODIES = {
    "a login page": b"<html>login</html>",
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "a number": b"1" * 5000,
    "no UTF-8": b"\xff\xfe{",
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "half": b'{"identity": "a',
    "not a number": b'{"identity": NaN}',
    "twice": b'{"identity": "a", "identity": "b"}',
    "half a character": b'{"identity": "\\ud800"}',
}
Reply = tuple[int, dict[str, str], bytes]


class Handler(BaseHTTPRequestHandler):
    """Answers /health as it should, and all else as `reply` says."""

    reply: Reply = (200, {}, b"{}")

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        self.rfile.read(length)
        status, headers, body = (200, {}, b"") if self.path == "/health" else Handler.reply
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "content-length" not in headers:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def replies() -> dict[str, Reply]:
    found: dict[str, Reply] = {what: (200, {}, body) for what, body in BODIES.items()}
    gzipped = gzip.compress(b"{}" * 1000)
    found |= {
        "corrupt gzip": (200, {"content-encoding": "gzip"}, b"no gzip"),
        "half of gzip": (200, {"content-encoding": "gzip"}, gzipped[:-9]),
        "corrupt deflate": (200, {"content-encoding": "deflate"}, b"\xff" * 20),
        "an unknown charset": (200, {"content-type": "text/html; charset=idna"}, b"\xff.\xff" * 40),
        "a redirect": (302, {"location": "http://127.0.0.1:9/steal"}, b""),
        "a redirect to nowhere": (307, {"location": "http://[::1"}, b""),
        "fewer bytes than it says": (200, {"content-length": "100"}, b"{}"),
        "no content": (204, {}, b""),
        "created": (201, {}, b'{"status": "ok", "success": true}'),
        "an error": (500, {}, b"\xff\xfe"),
        "another's error": (403, {}, b"<html>"),
        "too many": (429, {}, b"{}"),
    }
    return found


def clients(address: str) -> list[ServerClient]:
    return [kind(address, {}) for kind in (ServerClient, StockClient, SGLangClient)]


@pytest.mark.parametrize("what", replies())
def test_whatever_is_asked_a_broken_reply_is_an_error_of_ours(what: str, address: str) -> None:
    Handler.reply = replies()[what]
    for client in clients(address):
        calls: list[Callable[[], Any]] = [
            lambda client=client: client.post("update_weights", {}),
            lambda client=client: client.post(client.generates, {}),
            lambda client=client: client.told("/any"),
            lambda client=client: client.samples({"image": 1}),
            lambda client=client: client.workers(),
            lambda client=client: client.draft_counts(2),
            lambda client=client: client.refuse_other_version(),
            lambda client=client: client.probe(paused=True),
            lambda client=client: client.land(3),
            lambda client=client: client.abort_all(),
        ]
        if type(client) is ServerClient:
            calls += [client.identity, lambda client=client: client.claim("this run")]
        for number, call in enumerate(calls):
            silent = what == "nothing" and client.wordless and number == len(calls) - 1
            if silent:
                call()
                continue
            with pytest.raises(EngineError):
                call()


@pytest.mark.parametrize("what", replies())
def test_a_completion_that_is_none_is_a_fault(what: str, address: str) -> None:
    Handler.reply = replies()[what]
    for client in clients(address)[1:]:
        with pytest.raises(EngineFault):
            asyncio.run(asked(client))


async def asked(client: ServerClient) -> protocol.ServerReply:
    connections = client.connections()
    try:
        return await client.ask(connections, [5, 6], SAMPLING, 20.0)
    finally:
        await connections.close()


@pytest.mark.parametrize(("place", "right"), [(1, VLLM), (2, SGLANG)])
def test_a_right_completion_is_read_and_each_mutated_one_is_read_or_a_fault(
    place: int, right: dict[str, Any], address: str
) -> None:
    client = clients(address)[place]
    Handler.reply = (200, {}, json.dumps(right).encode())
    reply = asyncio.run(asked(client))
    assert list(protocol.numbers("i", reply.token_ids)) == [4, 1] and reply.spans == [("3", 0, 2)]
    random_of = random.Random(7)
    limits = CompletionLimits(4, 100, frozenset({1}), other_stops=False)

    async def answer_of(client: Any, connections: Any, body: Any, seconds: float) -> Any:
        return spoilt

    refused = 0
    for _ in range(2000):
        spoilt = mutated(right, random_of)
        client.generate = lambda connections, body, seconds: answer_of(
            client, connections, body, seconds
        )  # type: ignore[method-assign]
        try:
            found = answered(asyncio.run(client.ask(None, [5], SAMPLING, 1.0)), limits=limits)  # type: ignore[arg-type]
        except EngineFault:
            refused += 1
        else:
            assert all(0 <= token < 100 for token in found.token_ids)
            assert len(found.token_ids) == len(found.logprobs) == len(found.of_tokens) <= 4
    assert refused > 1000


ODD: list[Any] = [
    *(None, True, [], {}, "", "x", "3@a", -1, 0, 7, 2**31, 2**63, 10**30, 0.5, 1e39, -1e308),
    *(float("nan"), float("-inf"), [[]], {"a": 1}, [None], "\ud800", [1.5], "stop", "abort"),
]


def mutated(value: Any, random_of: random.Random) -> Any:
    """Returns a copy in which something is something else, there twice, or missing."""
    if not isinstance(value, dict | list) or not value or random_of.random() < 0.15:
        return random_of.choice(ODD)
    if isinstance(value, dict):
        name = random_of.choice(list(value))
        if random_of.random() < 0.2:
            return {key: each for key, each in value.items() if key != name}
        return value | {name: mutated(value[name], random_of)}
    place = random_of.randrange(len(value))
    if random_of.random() < 0.2:
        return [*value[:place], *value[place:][: random_of.choice([0, 2])] * 2]
    return [*value[:place], mutated(value[place], random_of), *value[place + 1 :]]


@pytest.mark.parametrize("what", replies())
def test_a_servers_goes_on_without_a_server_whose_replies_are_broken(
    what: str, address: str, tmp_path: Path
) -> None:
    Handler.reply = replies()[what]
    server_list = tmp_path / "server_list"
    server_list.write_text(f"{address}\nhttp://[::1\n")
    server_group = server_group_of(server_list)
    assert server_group.renew() == []
    assert [str(each.state) for each in server_group.members] == ["dead"]


def server_group_of(server_list: Path) -> ServerGroup:
    def none_of_ours(number: int) -> Any:
        raise AssertionError(number)

    def check(server: ServerClient) -> None:
        server.refuse_other_version()

    return ServerGroup(
        none_of_ours, client=lambda at: ServerClient(at, {}), server_list=server_list, check=check
    )


def test_nobody_leaves_by_a_server_list_that_is_half_written(tmp_path: Path) -> None:
    server_list = tmp_path / "server_list"
    server_list.write_text("http://127.0.0.1:1\nhttp://127.0.0.1:2\n")
    server_group = server_group_of(server_list)
    server_group.renew()
    for half in ("http://127.0.0.1:1\nhttp://127.0.", "\0", "http://127.0.0.1:2/\nhttp:"):
        server_list.write_text(half)
        server_group.renew()
        assert len(server_group.members) == 2
    server_list.write_text("http://127.0.0.1:2/\n")
    server_group.renew()
    assert [each.server.address for each in server_group.members] == ["http://127.0.0.1:2"]


def test_one_server_under_two_names_is_taken_in_once(address: str, tmp_path: Path) -> None:
    from vllm import __version__

    Handler.reply = (200, {}, json.dumps({"identity": "one", "version": __version__}).encode())
    server_list = tmp_path / "server_list"
    server_list.write_text(f"{address}\n{address.replace('127.0.0.1', 'localhost')}\n")
    server_group = server_group_of(server_list)
    server_group.renew()
    assert sorted(str(each.state) for each in server_group.members) == ["dead", "stale"]


def test_a_reply_that_never_ends_and_one_that_is_too_large_are_left(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    Handler.reply = (200, {}, b"{" * 100_000)
    monkeypatch.setattr(http_reply, "MOST_BYTES", 1000)
    with pytest.raises(EngineFault, match="more than 1000 bytes"):
        ServerClient(address, {}).told("/any")

    class Slow:
        status_code = 200

        def __enter__(self) -> "Slow":
            return self

        def __exit__(self, *_: Any) -> None: ...

        def iter_bytes(self) -> Iterator[bytes]:
            while True:
                time.sleep(0.01)
                yield b" "

    monkeypatch.setattr(http_reply.httpx, "stream", lambda *_, **__: Slow())
    with pytest.raises(EngineFault, match=r"had not ended after 0\.1 s"):
        ServerClient(address, {}).told("/any", seconds=0.1)
