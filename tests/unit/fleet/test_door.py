"""The door of a vLLM server: without the run's key, and to paths that the trainer does not ask for,
nobody comes in.
"""

import asyncio
from typing import Any

import pytest

from rftmega.vllm_server.door import KEY, PATHS, SAMPLES, Door, headers
from rftmega.vllm_server.wire import SOCKET


def asked(monkeypatch: pytest.MonkeyPatch, **scope: Any) -> tuple[bool, list[dict[str, Any]]]:
    """Whether the application was reached, and what was answered."""
    monkeypatch.setenv(KEY, "the key")
    reached, sent = [], []

    async def application(*_: Any) -> None:
        reached.append(True)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Door(application)({"headers": [], "method": "GET", **scope}, None, send))  # type: ignore[arg-type]
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
    for path in (*sorted(PATHS), SAMPLES, "/v1/models", "/collective_rpc"):
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
    with pytest.raises(KeyError):
        Door(None)  # type: ignore[arg-type]
