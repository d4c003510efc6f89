"""One request over several servers and several versions of the weights."""

import asyncio
import math
from array import array
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
import torch

from rftmega.config import RolloutConfig
from rftmega.core.errors import EngineFault
from rftmega.core.sampling_seeds import continued_seed
from rftmega.core.types import Completion, Prompt, Sampling
from rftmega.rollout.requests import Request
from rftmega.rollout.servers import server_group_client
from rftmega.rollout.servers.connection import ServerConnection
from rftmega.rollout.servers.health import DEAD_AFTER, ServerHealth
from rftmega.rollout.servers.protocol.server_replies import answered
from rftmega.rollout.servers.server_client import Connections
from rftmega.rollout.servers.server_engine import ServerEngine
from rftmega.rollout.servers.server_group_client import ServerGroupClient
from rftmega.rollout.servers.vllm import protocol
from rftmega.runtime.parallel.process_group import World
from tests.server_groups import set_servers

Replies = Callable[["Says"], protocol.ServerReply]


def reply(ids: list[int], spans: list[tuple[str, int, int]], reason: str) -> protocol.ServerReply:
    logprobs = array("f", [-0.25 * token for token in ids]).tobytes()
    return protocol.ServerReply(0, protocol.integers(ids), logprobs, reason, spans)


class Says:
    """A server that answers by a list of functions, and remembers what it was asked."""

    address, headers, alive = "http://127.0.0.1:9", {"Authorization": "Bearer key"}, True
    own = True

    def __init__(self, *replies: Replies):
        self.left, self.asked = [*replies], list[tuple[list[int], dict[str, Any], str]]()
        self.posted = list[str]()

    async def ask(
        self,
        connections: Any,
        token_ids: Any,
        sampling: Any,
        seconds: float,
        *,
        salt: str = "",
        adapter: int = 0,
    ) -> protocol.ServerReply:
        self.asked.append((list(token_ids), dict(sampling), salt))
        return self.left.pop(0)(self)

    def post(self, path: str, body: Any = None) -> None:
        self.posted.append(path)

    def connections(self) -> Connections:
        socket = ServerConnection(self.address, self.headers)
        return Connections(self, httpx.AsyncClient(), socket)  # type: ignore[arg-type]


def engine_of(*servers: Says, on_update: str = "recompute") -> ServerEngine:
    elsewhere = World(1, 2, 1, 2, torch.device("cpu"))  # starts none
    config = RolloutConfig(max_response_tokens=6, max_batch=2, on_update=on_update)  # type: ignore[arg-type]
    engine = ServerEngine(
        "m", config, elsewhere, dtype="float32", stop_ids=[1], logs="logs", vocabulary=100
    )
    set_servers(engine, *servers)
    engine.version = engine.newest = 3
    return engine


def test_an_answer_has_the_room_that_its_context_leaves() -> None:
    """Whoever started the server may have set no limit to its context."""
    server = Says(lambda says: reply([1], [("3", 0, 1)], "stop"))
    engine = engine_of(server)
    completed(engine, Request([5] * (engine.row_tokens - 2), 11))
    ((_, how, _),) = server.asked
    assert how["max_tokens"] == 2


def completed(engine: ServerEngine, request: Request) -> Completion:
    async def run() -> Completion:
        client = ServerGroupClient(engine)
        try:
            async with asyncio.timeout(10):
                return await client.complete(request, Sampling(0.5))
        finally:
            await client.close()

    return asyncio.run(run())


def test_what_was_cancelled_goes_on_from_its_tokens_under_the_next_weights() -> None:
    def cancelled(server: Says) -> protocol.ServerReply:
        engine.version = engine.newest = 4
        return reply([7, 8], [("3", 0, 2)], "abort")

    server = Says(cancelled, lambda server: reply([9, 1], [("4", 0, 2)], "stop"))
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
        lambda server: reply([], [], "abort"),
        lambda server: reply([1], [("3", 0, 1)], "stop"),
    )
    completed(engine_of(server), Request((5, 6), seed=11))
    assert server.asked[0] == server.asked[1]


def test_an_answer_over_a_change_of_weights_has_the_version_of_each_token() -> None:
    def over(server: Says) -> protocol.ServerReply:
        engine.version = engine.newest = 4
        return reply([7, 8, 9], [("3", 0, 1), ("4", 1, 3)], "length")

    engine = engine_of(Says(over))
    assert list(completed(engine, Request((5,), seed=1)).versions) == [3, 4, 4]


def asked_elsewhere(wrong: Replies) -> None:
    """Answers a request that one server answers wrongly, by another that gives the token 1."""
    one, other = Says(wrong), Says(lambda server: reply([1], [("3", 0, 1)], "stop"))
    engine = engine_of(one, other)
    assert list(completed(engine, Request((5,), seed=11)).token_ids) == [1]
    assert one.asked == other.asked and engine.healthy == [other]


WRONG: dict[str, Callable[[], protocol.ServerReply]] = {
    "an id beyond the vocabulary": lambda: told([5, 100, 1]),
    "an id of a thousand million": lambda: told([10**9, 1]),
    "a negative id": lambda: told([-5, 1]),
    "a log-prob that is no number": lambda: told([5, 1], [-0.5, math.nan]),
    "a log-prob of minus infinity": lambda: told([5, 1], [-math.inf, -0.5]),
    "a log-prob of a probability above 1": lambda: told([5, 1], [0.7, -0.5]),
    "more tokens than were asked for": lambda: told([5] * 7, reason="length"),
    "no token, and stop": lambda: told([]),
    "no token, and length": lambda: told([], reason="length"),
    "an unknown reason": lambda: told([5, 1], reason="banana"),
    "stop without a stop token": lambda: told([5, 6]),
    "a token behind a stop token": lambda: told([5, 1, 5], reason="length"),
    "a stop token before it was broken off": lambda: told([5, 1], reason="abort"),
    "broken off with all tokens": lambda: told([5] * 6, reason="abort"),
    "fewer log-probs": lambda: told([5, 1], [-0.5]),
    "13 bytes of ids": lambda: spoilt(token_ids=protocol.integers([5, 5, 1]) + b"x"),
    "6 bytes of log-probs": lambda: spoilt(logprobs=b"123456"),
    "spans that overlap": lambda: told([5, 6, 1], spans=[("3", 0, 2), ("3", 1, 3)]),
    "as many versions as tokens, from another place": lambda: told(
        [5, 6, 1], spans=[("3", 0, 2), ("3", 1, 2)]
    ),
    "a span backwards": lambda: told([5, 6, 1], spans=[("3", 0, 3), ("3", 3, 1)]),
    "a span before the first": lambda: told([5, 1], spans=[("3", 0, -3)]),
    "a span of 2**62 tokens": lambda: told([5, 1], spans=[("3", 0, 2**62)]),
    "a version in other digits": lambda: told([5, 1], spans=[("\u0663", 0, 2)]),
    "a version that is superscript": lambda: told([5, 1], spans=[("\u00b3", 0, 2)]),
    "a version of 5,000 digits": lambda: told([5, 1], spans=[("3" * 5000, 0, 2)]),
    "a version of another run": lambda: told([5, 1], spans=[("3@0badcafe", 0, 2)]),
}


def told(
    ids: list[int],
    logprobs: list[float] | None = None,
    reason: str = "stop",
    spans: list[tuple[str, int, int]] | None = None,
) -> protocol.ServerReply:
    values = array("f", [-0.5] * len(ids) if logprobs is None else logprobs).tobytes()
    of_all = [("3", 0, len(ids))]
    return protocol.ServerReply(
        0, protocol.integers(ids), values, reason, of_all if spans is None else spans
    )


def spoilt(**part: bytes) -> protocol.ServerReply:
    return msgspec.structs.replace(told([5, 5, 1]), **part)


@pytest.mark.parametrize("what", WRONG)
def test_an_answer_that_is_none_is_asked_of_another(what: str) -> None:
    asked_elsewhere(lambda server: WRONG[what]())


def test_one_generation_asks_another_server_for_an_answer_that_is_none() -> None:
    one, other = Says(lambda server: told([-5, 1])), Says()
    other.left = [lambda server: reply([1], [("3", 0, 1)], "stop")] * 2
    engine = engine_of(one, other)
    one.left *= 2
    prompts = [Prompt((5, 6), task=task) for task in range(2)]
    found = engine.generate(prompts, seeds=[11, 12], sampling=Sampling(1.0))
    assert [list(each.token_ids) for each in found] == [[1], [1]]
    assert engine.healthy == [other]


def test_what_an_engine_in_order_gives_is_taken() -> None:
    for ids, reason in (
        ([5, 6, 1], "stop"),
        ([5] * 6, "length"),
        ([99, 0], "length"),
        ([5] * 5 + [1], "length"),
    ):
        rounded = [1e-6, *[-9999.0] * (len(ids) - 1)]
        engine = engine_of(Says(lambda server: told(ids, rounded, reason)))  # noqa: B023
        assert list(completed(engine, Request((5,), seed=1)).token_ids) == ids
    engine = engine_of(Says(lambda server: told([5, 6])))
    engine.config.stop = ["\n"]
    assert completed(engine, Request((5,), seed=1)).finish_reason == "stop"


def test_a_server_that_breaks_off_again_and_again_without_a_token_is_left() -> None:
    one = Says(*[lambda server: reply([], [], "abort")] * 100)
    other = Says(lambda server: reply([1], [("3", 0, 1)], "stop"))
    engine = engine_of(one, other)
    completed(engine, Request((5,), seed=11))
    assert len(one.asked) == server_group_client.EMPTY_ABORTS and engine.healthy == [other]


def test_pushes_may_break_a_request_off_as_often_as_they_come() -> None:
    def cancelled(server: Says) -> protocol.ServerReply:
        engine.version = engine.newest = engine.newest + 1
        return reply([], [], "abort")

    server = Says(*[cancelled] * 20, lambda server: reply([1], [("23", 0, 1)], "stop"))
    engine = engine_of(server, on_update="abort")
    assert completed(engine, Request((5,), seed=11)).policy_version == 23


def test_a_server_that_answers_probes_alone_is_dead_after_a_few_faults() -> None:
    health = ServerHealth(lambda: 0.0)
    health.came()
    health.landed()
    for _ in range(DEAD_AFTER):
        assert health.failed() and health.state == "suspect"
        health.probed(True)
    assert health.failed() and health.state == "dead"
    health.came()
    health.landed()
    for _ in range(3 * DEAD_AFTER):
        health.failed()
        health.probed(True)
        health.answered(1)
    assert health.state == "healthy"


@pytest.mark.parametrize(
    "spans",
    [[("3", 0, 1)], [("3", 1, 2)], []],
    ids=["too few", "a gap", "none"],
)
def test_an_answer_that_does_not_say_under_which_weights_is_asked_of_another(
    spans: list[tuple[str, int, int]],
) -> None:
    asked_elsewhere(lambda server: reply([7, 1], spans, "stop"))


@pytest.mark.parametrize("version", ["2", "5", "random"], ids=["older", "not pushed", "of no push"])
def test_an_answer_under_weights_that_were_not_there_is_asked_of_another(version: str) -> None:
    other = Says(lambda server: reply([1], [("3", 0, 1)], "stop"))
    engine = engine_of(Says(lambda server: reply([7, 1], [(version, 0, 2)], "stop")), other)
    assert list(completed(engine, Request((5,), seed=1)).token_ids) == [1]
    (stale, healthy) = engine.server_group.members
    stale.health.probed(True)  # it answers, and has no weights of the run all the same
    assert (stale.state, healthy.state) == ("stale", "healthy")


def test_a_request_of_a_server_that_fails_is_asked_of_another_with_the_same_seed() -> None:
    def fails(server: Says) -> protocol.ServerReply:
        raise EngineFault("it is gone")

    one, other = Says(fails), Says(lambda server: reply([1], [("3", 0, 1)], "stop"))
    engine = engine_of(one, other)
    assert list(completed(engine, Request((5,), seed=11)).token_ids) == [1]
    assert one.asked == other.asked and engine.healthy == [other]


def test_a_request_of_a_server_that_missed_a_push_meanwhile_is_asked_of_another() -> None:
    """A paused server sends nothing, and its connection stays open."""

    class Paused(Says):
        async def ask(self, *given: Any, **named: Any) -> protocol.ServerReply:
            engine.server_group.members[0].health.failed()
            await asyncio.Event().wait()
            raise AssertionError

    one, other = Paused(), Says(lambda server: reply([1], [("3", 0, 1)], "stop"))
    engine = engine_of(one, other)
    assert list(completed(engine, Request((5,), seed=11)).token_ids) == [1]
    assert engine.healthy == [other]


def test_a_server_list_that_can_not_be_read_now_does_not_end_the_probes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_group_client, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(server_group_client, "ELSEWHERE_SECONDS", 0.0)
    engine = engine_of(Says())
    looked = list[int]()

    def look() -> None:
        looked.append(1)
        raise OSError("stale file handle")

    engine.server_group.find_remote_servers = look  # type: ignore[method-assign]

    async def watched() -> None:
        task = asyncio.create_task(server_group_client.ServerGroupClient(engine)._watch())
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
    server = Says(lambda server: reply([1], [("3", 0, 1)], "stop"))
    engine = engine_of(server, on_update=on_update)
    completed(engine, Request((5,), seed=1))
    assert server.asked[0][2] == salt
    engine.begin()
    assert server.posted[0] == path


def test_a_completion_of_one_version_says_so() -> None:
    one = answered(reply([4, 5], [("2", 0, 2)], "stop")).whole()
    assert one == Completion((4, 5), (-1.0, -1.25), "stop", 2)
    assert not one.versions
