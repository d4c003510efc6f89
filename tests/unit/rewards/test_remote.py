import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rftmega.core.errors import RewardError
from rftmega.rewards.part import Answer
from rftmega.rewards.remote import RemotePart, read_rewards

Say = Callable[[BaseHTTPRequestHandler, dict[str, Any]], tuple[int, bytes]]
ANSWERS = [Answer(f"r{i}", f"l{i}", f"k{i}", (i,)) for i in range(5)]


@contextmanager
def server(say: Say) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(address, what was asked so far) of a server that `say` speaks for."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status, body = say(self, asked[-1])
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *said: Any) -> None: ...

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *what: Any) -> None: ...

    with Quiet(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield f"http://me:secret@127.0.0.1:{running.server_port}/score?key=secret", asked
        finally:
            running.shutdown()


def part(url: str, *, timeout: float = 60.0, retries: int = 2, batch: int = 2) -> RemotePart:
    return RemotePart(
        url, lambda ids: f"p{ids[0]}", timeout=timeout, retries=retries, batch=batch, pause=0.01
    )


def by_number(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> tuple[int, bytes]:
    return 200, json.dumps(
        {"rewards": [float(text[1:]) / 2 for text in asked["responses"]]}
    ).encode()


def test_answers_travel_in_batches_and_rewards_come_back_in_order() -> None:
    with server(by_number) as (url, asked):
        assert part(url)(ANSWERS) == [0.0, 0.5, 1.0, 1.5, 2.0]
        assert part(url)([]) == []
    assert [len(question["responses"]) for question in asked] == [2, 2, 1]
    assert asked[1] == {
        "prompts": ["p2", "p3"],
        "responses": ["r2", "r3"],
        "labels": ["l2", "l3"],
        "kinds": ["k2", "k3"],
    }


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_that_recovers_is_asked_again(status: int) -> None:
    replies = iter([(status, b"busy"), (status, b"busy")])
    with server(lambda handler, asked: next(replies, None) or by_number(handler, asked)) as (
        url,
        asked,
    ):
        assert part(url)(ANSWERS[:2]) == [0.0, 0.5]
    assert len(asked) == 3


def test_a_lost_connection_is_tried_again() -> None:
    def hang_up_once(
        handler: BaseHTTPRequestHandler, question: dict[str, Any]
    ) -> tuple[int, bytes]:
        if len(asked) == 1:
            handler.connection.close()
            raise ConnectionError
        return by_number(handler, question)

    with server(hang_up_once) as (url, asked):
        assert part(url)(ANSWERS[:1]) == [0.0]
    assert len(asked) == 2


def test_a_server_that_stays_broken_is_an_error_with_address_attempts_and_reply_and_without_secrets() -> (
    None
):
    with server(lambda handler, asked: (500, b"no model here")) as (url, asked):
        with pytest.raises(
            RewardError,
            match=r"127\.0\.0\.1:\d+/score gave nothing in 3 attempt.*status 500, 'no model here'",
        ) as caught:
            part(url)(ANSWERS)
    assert len(asked) == 3 and "secret" not in str(caught.value)


@pytest.mark.parametrize("status", [400, 404, 302])
def test_a_refusal_is_not_repeated(status: int) -> None:
    with server(lambda handler, asked: (status, b"what?")) as (url, asked):
        with pytest.raises(
            RewardError, match=f"/score was asked about 2 completions: status {status}, 'what\\?'"
        ):
            part(url)(ANSWERS)
    assert len(asked) == 1


def test_a_server_that_does_not_answer_in_time_is_an_error() -> None:
    over = threading.Event()

    def sleep(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> tuple[int, bytes]:
        over.wait(60)
        return by_number(handler, asked)

    with server(sleep) as (url, asked):
        with pytest.raises(
            RewardError, match=r"2 attempt\(s\) of at most 0.1 s; the last: ReadTimeout"
        ):
            part(url, timeout=0.1, retries=1)(ANSWERS)
        over.set()


def test_a_reply_that_trickles_in_is_too_late_as_a_whole() -> None:
    over = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> tuple[int, bytes]:
        handler.send_response(200)
        handler.send_header("content-length", "100000")
        handler.end_headers()
        while not over.is_set():
            handler.wfile.write(b" ")
            time.sleep(0.01)
        raise ConnectionError

    with server(trickle) as (url, asked):
        with pytest.raises(RewardError, match="trickles in"):
            part(url, timeout=0.2, retries=0)(ANSWERS)
        over.set()


def test_nobody_there_is_an_error() -> None:
    with server(by_number) as (url, _):
        pass
    with pytest.raises(
        RewardError, match=r"127\.0\.0\.1:\d+/score gave nothing in 3 attempt.*ConnectError"
    ):
        part(url)(ANSWERS)


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        ("<html>", "not JSON: '<html>'"),
        ("", "not JSON"),
        ("[1.0, 2.0]", "no object with a list"),
        ('{"reward": [1, 2]}', "no object with a list"),
        ('{"rewards": 1}', "no object with a list"),
        ('{"rewards": [1]}', "holds 1 rewards"),
        ('{"rewards": [1, NaN]}', "reward 1 of the reply is 'nan'"),
        ('{"rewards": [1, 1e999]}', "reward 1 of the reply is 'inf'"),
        ('{"rewards": [1, 1%s]}' % ("0" * 400), "not a finite number"),
        ('{"rewards": ["1", 2]}', "reward 0 of the reply is '1'"),
        ('{"rewards": [true, 2]}', "reward 0 of the reply is 'True'"),
        ('{"rewards": [null, 2]}', "reward 0 of the reply is 'None'"),
        ("[" * 100000, "not JSON"),
    ],
)
def test_garbage_is_an_error_that_quotes_it_and_never_a_reward(reply: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_rewards(reply, 2)


def test_garbage_is_an_error_that_names_the_address() -> None:
    with server(lambda handler, asked: (200, b"\xff\xfe garbage")) as (url, asked):
        with pytest.raises(
            RewardError,
            match=r"127\.0\.0\.1:\d+/score was asked about 2 completions: the reply is not JSON",
        ):
            part(url)(ANSWERS)
    assert len(asked) == 1
