"""The door of a vLLM server: without the run's key, and to paths that the trainer does not ask for,
nobody comes in.
"""

import asyncio
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest

from rftmega.config import RunConfig
from rftmega.core.errors import ConfigError
from rftmega.rollout.servers.vllm.auth import (
    ADAPTER,
    KEY,
    PATHS,
    SAMPLES,
    Authentication,
    given_key,
    headers,
)
from rftmega.rollout.servers.vllm.protocol import SOCKET
from rftmega.run.preflight import preflight


def asked(monkeypatch: pytest.MonkeyPatch, **scope: Any) -> tuple[bool, list[dict[str, Any]]]:
    """Whether the application was reached, and what was answered."""
    monkeypatch.setenv(KEY, "the key")
    reached, sent = [], []
    body = iter(scope.pop("body", []))

    async def receive() -> Any:
        return next(body)

    async def application(*_: Any) -> None:
        reached.append(True)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(
        Authentication(application)({"headers": [], "method": "GET", **scope}, receive, send)
    )  # type: ignore[arg-type]
    return bool(reached), sent


def encoded(**given: str) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in given.items()]


RIGHT = encoded(**headers("the key"))
WRONG = {
    "none": [],
    "another key": encoded(Authorization="Bearer another"),
    "a beginning": encoded(Authorization="Bearer the"),
    "no scheme": encoded(Authorization="the key"),
    "in another header": encoded(**{"X-Api-Key": "Bearer the key"}),
    "not ASCII": [(b"authorization", b"Bearer \xff")],
}


@pytest.mark.parametrize("path", sorted(PATHS))
def test_with_the_key_the_trainers_requests_come_in(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(monkeypatch, type="http", path=path, headers=RIGHT) == (True, [])


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
def test_without_the_key_nothing_does_whatever_its_method(
    what: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (*sorted(PATHS), SAMPLES, ADAPTER, "/v1/models", "/collective_rpc"):
        reached, sent = asked(
            monkeypatch, type="http", path=path, method=method, headers=WRONG[what]
        )
        assert not reached and sent[0]["status"] == 401


@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc",
        "/v1/models",
        "/docs",
        "/metrics",
        "/update_weights/",
        "//health",
        "/sleep",
        "/",
    ],
)
def test_with_the_key_other_paths_are_not_there(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, sent = asked(monkeypatch, type="http", path=path, headers=RIGHT)
    assert not reached and sent[0]["status"] == 404


def test_other_protocols_are_closed_and_a_start_is_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = False, [{"type": "websocket.close", "code": 1008}]
    assert asked(monkeypatch, type="websocket", path="/v1/realtime", headers=RIGHT) == closed
    for path in ("/health", SAMPLES, "/v1/realtime"):
        assert asked(monkeypatch, type="websocket", path=path, headers=RIGHT) == closed
    for wrong in WRONG.values():
        assert asked(monkeypatch, type="websocket", path=SOCKET, headers=wrong) == closed
    assert asked(monkeypatch, type="lifespan") == (True, [])


def test_without_a_key_a_server_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ValueError, match=f"{KEY} is not set"):
        Authentication(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("", "is empty"),
        ("k\n", r"has '\\n' as character 2 of 2"),
        ("k\u00e4", "has '\u00e4' as character 2 of 2"),
        ("k\r\nX-Evil: 1", r"has '\\r' as character 2"),
        (" k", "has ' ' as character 1"),
        ("k ", "has ' ' as character 2"),
        ("\tk", r"has '\\t' as character 1"),
        ("k\0", "as character 2 of 2"),
        ("\ufeffk", "as character 1"),
    ],
)
def test_what_can_not_be_a_key_starts_nothing_and_is_said(
    key: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {KEY: key})  # a NUL is in nobody's
    for build in (lambda: Authentication(None), given_key, lambda: headers(key)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"{KEY} .*{said}.*openssl rand"):
            build()
    config = RunConfig(strategy="separate")
    config.rollout.addresses = ["http://10.0.0.2:8100"]
    with pytest.raises(ConfigError, match=f"{KEY} .*{said}"):
        preflight(config, 1)


class Workers:
    """What a server asks of its workers."""

    def __init__(self, lora: Any) -> None:
        self.vllm_config = SimpleNamespace(lora_config=lora)
        self.asked: list[Any] = []

    async def collective_rpc(self, method: str, *, args: Any) -> list[str]:
        self.asked.append((method, *args))
        if args[1] == 9:
            raise RuntimeError("a worker is dead")
        return ["", "not as it was sent" if args[1] == 8 else ""]


def brought(
    monkeypatch: pytest.MonkeyPatch, workers: Workers, *body: dict[str, Any], version: int = 7
) -> list[dict[str, Any]]:
    """What is answered to a payload."""
    _, sent = asked(
        monkeypatch,
        type="http",
        method="POST",
        path=ADAPTER,
        headers=RIGHT,
        query_string=f"version={version}".encode(),
        app=SimpleNamespace(state=SimpleNamespace(engine_client=workers)),
        body=body,
    )
    return sent


def test_a_payload_goes_whole_to_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"ab", "more_body": True},
        {"type": "http.request", "body": b"c"},
    ]
    workers = Workers("some")
    assert brought(monkeypatch, workers, *parts)[0]["status"] == 200
    assert workers.asked == [("take_adapter", b"abc", 7)]
    started, said = brought(monkeypatch, workers, *parts, version=8)
    assert started["status"] == 500 and "not as it was sent" in json.loads(said["body"])["error"]
    started, said = brought(monkeypatch, workers, *parts, version=9)
    assert started["status"] == 500 and "a worker is dead" in said["body"].decode()
    without = Workers(None)
    started, said = brought(monkeypatch, without, *parts)
    assert started["status"] == 500 and "started without adapters" in said["body"].decode()
    assert without.asked == []


def test_half_of_a_payload_goes_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers("some")
    half = {"type": "http.request", "body": b"ab", "more_body": True}
    assert brought(monkeypatch, workers, half, {"type": "http.disconnect"}) == []
    assert workers.asked == []
