"""One request over several servers and several versions of the weights."""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rftmega.config import RolloutConfig
from rftmega.errors import EngineError, EngineFault
from rftmega.fleet import fleet_client
from rftmega.fleet.connection import ServerConnection
from rftmega.fleet.fleet_client import FleetClient
from rftmega.fleet.server_answers import answered
from rftmega.fleet.server_engine import ServerEngine
from rftmega.parallel.process_group import World
from rftmega.requests import Request
from rftmega.sampling_seeds import continued_seed
from rftmega.types import Completion, Sampling
from rftmega.vllm_server import wire
from tests.fleets import set_servers

Answers = Callable[["Says"], wire.ServerAnswer]


def answer(ids: list[int], spans: list[tuple[str, int, int]], reason: str) -> wire.ServerAnswer:
    logprobs = array("f", [-0.25 * token for token in ids]).tobytes()
    return wire.ServerAnswer(0, wire.integers(ids), logprobs, reason, spans)


class Says:
    """A server that answers by a list of functions, and remembers what it was asked."""

    address, headers, alive = "http://127.0.0.1:9", {"Authorization": "Bearer key"}, True
    own, verified = True, False

    def __init__(self, *answers: Answers):
        self.left, self.asked = [*answers], list[tuple[list[int], dict[str, Any], str]]()
        self.posted = list[str]()

    async def ask(
        self,
        line: Any,
        token_ids: Any,
        sampling: Any,
        seconds: float,
        *,
        salt: str = "",
        adapter: int = 0,
    ) -> wire.ServerAnswer:
        self.asked.append((list(token_ids), dict(sampling), salt))
        return self.left.pop(0)(self)

    def post(self, path: str, body: Any = None) -> None:
        self.posted.append(path)

    def connection(self) -> ServerConnection:
        return ServerConnection(self.address, self.headers)


def engine_of(*servers: Says, on_update: str = "recompute") -> ServerEngine:
    elsewhere = World(1, 2, 1, 2, torch.device("cpu"))  # starts none
    config = RolloutConfig(max_response_tokens=6, max_batch=2, on_update=on_update)  # type: ignore[arg-type]
    engine = ServerEngine("m", config, elsewhere, dtype="float32", stop_ids=[1], logs="logs")
    set_servers(engine, *servers)
    engine.version = engine.newest = 3
    return engine


def test_an_answer_has_the_room_that_its_context_leaves() -> None:
    """Whoever started the server may have set no limit to its context."""
    server = Says(lambda says: answer([1], [("3", 0, 1)], "stop"))
    engine = engine_of(server)
    completed(engine, Request([5] * (engine.row_tokens - 2), 11))
    ((_, how, _),) = server.asked
    assert how["max_tokens"] == 2


def completed(engine: ServerEngine, request: Request) -> Completion:
    async def run() -> Completion:
        client = FleetClient(engine)
        try:
            async with asyncio.timeout(10):
                return await client.complete(request, Sampling(0.5))
        finally:
            await client.close()

    return asyncio.run(run())


def test_what_was_cancelled_goes_on_from_its_tokens_under_the_next_weights() -> None:
    def cancelled(server: Says) -> wire.ServerAnswer:
        engine.version = engine.newest = 4
        return answer([7, 8], [("3", 0, 2)], "abort")

    server = Says(cancelled, lambda server: answer([9, 1], [("4", 0, 2)], "stop"))
    engine = engine_of(server, on_update="abort")
    found = completed(engine, Request((5, 6), seed=11))
    assert (list(found.token_ids), list(found.versions)) == ([7, 8, 9, 1], [3, 3, 4, 4])
    assert list(found.logprobs) == [-1.75, -2.0, -2.25, -0.25]
    assert (found.finish_reason, found.policy_version) == ("stop", 4)
    (first, how, _), (second, then, _) = server.asked
    assert (first, how["seed"], how["max_tokens"]) == ([5, 6], 11, 6)
    assert (second, then["max_tokens"]) == ([5, 6, 7, 8], 4)
    assert then["seed"] == continued_seed(11, 2) != 11


def test_what_was_cancelled_before_its_first_token_is_asked_again_as_it_was() -> None:
    server = Says(
        lambda server: answer([], [], "abort"),
        lambda server: answer([1], [("3", 0, 1)], "stop"),
    )
    completed(engine_of(server), Request((5, 6), seed=11))
    assert server.asked[0] == server.asked[1]


def test_an_answer_over_a_change_of_weights_has_the_version_of_each_token() -> None:
    def over(server: Says) -> wire.ServerAnswer:
        engine.version = engine.newest = 4
        return answer([7, 8, 9], [("3", 0, 1), ("4", 1, 3)], "length")

    engine = engine_of(Says(over))
    assert list(completed(engine, Request((5,), seed=1)).versions) == [3, 4, 4]


@pytest.mark.parametrize(
    "spans",
    [[("3", 0, 1)], [("3", 1, 2)], []],
    ids=["too few", "a gap", "none"],
)
def test_an_answer_that_does_not_say_under_which_weights_is_an_error(
    spans: list[tuple[str, int, int]],
) -> None:
    engine = engine_of(Says(lambda server: answer([7, 8], spans, "stop")))
    with pytest.raises(EngineError):
        completed(engine, Request((5,), seed=1))


@pytest.mark.parametrize("version", ["2", "5", "random"], ids=["older", "not pushed", "of no push"])
def test_an_answer_under_weights_that_were_not_there_is_asked_of_another(version: str) -> None:
    other = Says(lambda server: answer([1], [("3", 0, 1)], "stop"))
    engine = engine_of(Says(lambda server: answer([7, 8], [(version, 0, 2)], "stop")), other)
    assert list(completed(engine, Request((5,), seed=1)).token_ids) == [1]
    (stale, healthy) = engine.fleet.members
    stale.health.probed(True)  # it answers, and has no weights of the run all the same
    assert (stale.state, healthy.state) == ("stale", "healthy")


def test_a_request_of_a_server_that_fails_is_asked_of_another_with_the_same_seed() -> None:
    def fails(server: Says) -> wire.ServerAnswer:
        raise EngineFault("it is gone")

    one, other = Says(fails), Says(lambda server: answer([1], [("3", 0, 1)], "stop"))
    engine = engine_of(one, other)
    assert list(completed(engine, Request((5,), seed=11)).token_ids) == [1]
    assert one.asked == other.asked and engine.healthy == [other]


def test_a_roster_that_can_not_be_read_now_does_not_end_the_probes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_client, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(fleet_client, "ELSEWHERE_SECONDS", 0.0)
    engine = engine_of(Says())
    looked = list[int]()

    def look() -> None:
        looked.append(1)
        raise OSError("stale file handle")

    engine.fleet.look_elsewhere = look  # type: ignore[method-assign]

    async def watched() -> None:
        task = asyncio.create_task(fleet_client.FleetClient(engine)._watch())
        while len(looked) < 3:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(watched(), 20))
    assert "stale file handle" in caplog.text


@pytest.mark.parametrize(
    ("on_update", "path", "salt"),
    [
        ("wait", "pause?mode=wait", ""),
        ("abort", "pause?mode=abort", ""),
        ("recompute", "pause?mode=keep&clear_cache=true", ""),
        ("keep", "pause?mode=keep&clear_cache=false", "3"),
    ],
)
def test_servers_pause_as_the_option_says_and_no_new_request_reads_an_old_cache(
    on_update: str, path: str, salt: str
) -> None:
    server = Says(lambda server: answer([1], [("3", 0, 1)], "stop"))
    engine = engine_of(server, on_update=on_update)
    completed(engine, Request((5,), seed=1))
    assert server.asked[0][2] == salt
    engine.begin()
    assert server.posted[0] == path


def test_a_completion_of_one_version_says_so() -> None:
    one = answered(answer([4, 5], [("2", 0, 2)], "stop")).whole()
    assert one == Completion((4, 5), (-1.0, -1.25), "stop", 2)
    assert not one.versions
