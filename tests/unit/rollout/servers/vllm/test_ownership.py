"""A server belongs to one run at a time."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from rftmega.config import RolloutConfig
from rftmega.core.errors import EngineError
from rftmega.rollout.servers import server_group as server_group_module
from rftmega.rollout.servers.protocol.claims import ServerTaken
from rftmega.rollout.servers.protocol.weight_version import named, number_of
from rftmega.rollout.servers.server_client import ServerClient
from rftmega.rollout.servers.server_engine import ServerEngine
from rftmega.rollout.servers.stock_client import StockClient
from rftmega.rollout.servers.vllm import auth, ownership
from rftmega.rollout.servers.vllm.ownership import LEASE_SECONDS, TAKEN, Ownership
from rftmega.runtime.parallel import orphans
from rftmega.runtime.parallel.process_group import World
from rftmega.runtime.parallel.run_identity import FILE, run_identity
from tests.rollouts import save_scripted

KEY = "of this test"


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def claim(run: str, name: str = "a run") -> dict[str, str]:
    return {"run": run, "name": name}


def test_the_second_run_is_refused_and_told_whose_it_is() -> None:
    clock = Clock()
    owned = Ownership(clock)
    assert owned.told(claim("a", "in /a"))[0] == 200
    clock.now += LEASE_SECONDS - 1
    assert owned.told(claim("b")) == (TAKEN, {"owner": "in /a", "heard": LEASE_SECONDS - 1})
    assert owned.allows("a") and not owned.allows("b") and not owned.allows("")


def test_who_claims_again_keeps_it_and_the_same_run_comes_back_at_once() -> None:
    clock = Clock()
    owned = Ownership(clock)
    for _ in range(5):
        assert owned.told(claim("a"))[0] == 200
        clock.now += LEASE_SECONDS - 1
    assert owned.told(claim("b"))[0] == TAKEN and owned.changes == 1


def test_a_run_that_is_not_heard_of_loses_it_and_one_that_ends_leaves_it() -> None:
    clock = Clock()
    owned = Ownership(clock)
    owned.told(claim("a"))
    clock.now += LEASE_SECONDS
    assert owned.told(claim("b"))[0] == 200 and owned.changes == 2
    assert owned.told(claim("a"))[0] == TAKEN
    assert owned.told(claim("a", ""))[0] == TAKEN, "another run's end frees it"
    assert owned.told(claim("b", ""))[0] == 200
    assert owned.allows("") and owned.told(claim("a"))[0] == 200 and owned.changes == 3


@pytest.mark.parametrize(
    "said", [None, [], "a", {}, {"run": ""}, {"run": 1, "name": "a"}, {"run": "a", "name": None}]
)
def test_what_is_no_claim_changes_nothing(said: Any) -> None:
    owned = Ownership(Clock())
    assert owned.told(said)[0] == 400 and owned.changes == 0


@pytest.mark.parametrize(
    ("told", "run", "number"),
    [
        ("3", "", 3),
        ("3@ab", "ab", 3),
        ("3@ab", "", None),
        ("3", "ab", None),
        ("3@ab", "cd", None),
        ("3@", "", None),
        ("\u0663", "", None),
        ("\u00b2", "", None),
        ("-3", "", None),
        ("3 ", "", None),
        ("3\n", "", None),
        ("9" * 5000, "", None),
        ("", "", None),
    ],
)
def test_a_version_is_of_one_run(told: str, run: str, number: int | None) -> None:
    assert number_of(told, run) == number
    if number is not None:
        assert named(number, run) == told


def test_a_run_keeps_its_name_in_its_folder_and_a_copy_is_another(tmp_path: Path) -> None:
    first = run_identity(tmp_path / "a")
    assert run_identity(tmp_path / "a") == first != run_identity(tmp_path / "b")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / FILE).write_bytes((tmp_path / "a" / FILE).read_bytes())
    assert run_identity(tmp_path / "copy") != first == run_identity(tmp_path / "a")
    for spoilt in (b"", b"[]", b"\xff", b"{"):
        (tmp_path / "b" / FILE).write_bytes(spoilt)
        again = run_identity(tmp_path / "b")
        assert run_identity(tmp_path / "b") == again


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serves the door of a server, whose inside answers each request with an object."""
    from vllm import __version__

    monkeypatch.setenv(auth.KEY, KEY)
    monkeypatch.delenv(orphans.PARENT, raising=False)
    monkeypatch.setattr(server_group_module, "KEEP_SECONDS", 0.1)
    said = f'{{"status": "done", "world_size": 1, "version": "{__version__}"}}'.encode()

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": said})

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = uvicorn.Config(
        auth.Authentication(inside), port=port, log_level="error", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = server.force_exit = True
    thread.join()


def engine(folder: Path, address: str, **given: Any) -> ServerEngine:
    config = RolloutConfig(addresses=[address], transport="network")
    world = World(0, 1, 0, 1, torch.device("cpu"))
    return ServerEngine(
        folder, config, world, dtype="float32", stop_ids=[1], logs=folder / "servers", **given
    )


def test_two_runs_do_not_share_a_server(tmp_path: Path, served: str) -> None:
    save_scripted(tmp_path)
    first = engine(tmp_path, served)
    with pytest.raises(ServerTaken, match=f"belongs to another run, that of {tmp_path} on "):
        engine(tmp_path, served)
    (member,) = first.server_group.members
    identity = member.identity
    member.server.post("pause")
    for other in ("", "another"):
        stranger = ServerClient(served, auth.headers(KEY, other))
        for path in sorted(auth.PATHS - auth.FOR_ANYBODY):
            with pytest.raises(EngineError, match="status 409"):
                stranger.post(path.removeprefix("/"))
    first.close()
    second = engine(tmp_path, served)
    assert second.server_group.members[0].identity != identity, (
        "it holds the weights of another run"
    )
    second.close()


def test_a_run_that_starts_again_has_its_servers_at_once(tmp_path: Path, served: str) -> None:
    save_scripted(tmp_path)
    first = engine(tmp_path, served, run="ab")
    first.server_group._closed.set()  # it is killed, and releases nothing
    again = engine(tmp_path, served, run="ab")
    assert [str(each.state) for each in again.server_group.members] == ["stale"]
    again.close()


def test_a_run_whose_owner_is_gone_takes_its_server_over(
    tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_scripted(tmp_path)
    monkeypatch.setattr(ownership, "LEASE_SECONDS", 1.0)
    first = engine(tmp_path, served)
    time.sleep(1.5)
    with pytest.raises(ServerTaken):  # it is kept while it lives
        engine(tmp_path, served)
    first.server_group._closed.set()  # it is killed, and releases nothing
    begin = time.monotonic()
    second = engine(tmp_path, served)
    assert time.monotonic() - begin < 30
    (member,) = first.server_group.members
    member.health.landed()
    first.server_group._keep_one(member)
    assert str(member.state) == "dead", "the first run goes on with a server that it lost"
    second.close()


def test_pushes_are_named_by_their_run(tmp_path: Path, served: str) -> None:
    save_scripted(tmp_path)
    own = engine(tmp_path, served, run="ab")
    (server,) = own.servers
    told: list[Any] = []
    server.post = lambda path, body=None, seconds=None: told.append(body)  # type: ignore[method-assign]
    server._post = lambda path, seconds, **content: None  # type: ignore[method-assign]
    server.land(7)
    server.land_adapters(8, b"")
    stock = StockClient(served, {})
    stock.run, stock.post = "ab", server.post  # type: ignore[method-assign]
    stock.land(9)
    versions = [list(body.values())[0] for body in told if body]
    assert versions == ["7@ab", "8@ab", "9@ab"]
    del server.post, server._post
    own.close()


def test_claims_go_by_the_door_alone(served: str) -> None:
    at = served + ownership.OWNER
    assert httpx.post(at, json=claim("a")).status_code == 401
    headers = auth.headers(KEY)
    assert httpx.get(at, headers=headers).status_code == 404
    for body in (b"", b"[", b"\xff", b"[" * 100_000, b'{"run": 1}'):
        assert httpx.post(at, content=body, headers=headers).status_code == 400
