"""A teacher on servers: what it asks, what it makes of replies, and which replies it refuses."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from rftmega.config.options.teachers import Teacher
from rftmega.core.errors import ConfigError, EngineError
from rftmega.core.ragged import Ragged
from rftmega.core.teacher_scores import TeacherRequest
from rftmega.core.types import Rows
from rftmega.rollout.servers import served_teacher
from rftmega.rollout.servers.served_teacher import ServedTeacher

ROWS = [[5, 6, 7, 8], [1, 2, 3]]
VOCABULARY = 20
Reply = Callable[[dict[str, Any]], tuple[int, bytes]]


@contextmanager
def served(reply: Reply) -> Iterator[tuple[str, list[tuple[Any, dict[str, Any]]]]]:
    """A server's address, and the (headers, body) of its requests."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer(200, json.dumps({"data": [{"id": "wise"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.headers, body))
            self.answer(*reply(body))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()


def log_probs(tokens: list[int], place: int) -> dict[str, Any]:
    """Those of two likely tokens and of the one that is there, as vLLM gives them."""
    values = {3: -1.5, 4: -0.5} | {tokens[place]: -0.25 * tokens[place]}
    return {str(token): {"logprob": value, "rank": 1} for token, value in values.items()}


def good(body: dict[str, Any]) -> tuple[int, bytes]:
    tokens = body["prompt"]
    places = [None, *[log_probs(tokens, place) for place in range(1, len(tokens))]]
    return 200, json.dumps({"choices": [{"text": "", "prompt_logprobs": places}]}).encode()


def rows() -> Rows[Ragged]:
    tokens = Ragged.of([torch.tensor(row) for row in ROWS])
    masks = [torch.tensor([False, True, True]), torch.tensor([True, False])]
    return Rows(tokens, torch.tensor([2, 1]), tokens.lengths, Ragged.of(masks))


def teacher(*addresses: str, key_env: str = "") -> ServedTeacher:
    chosen = Teacher(addresses=list(addresses), key_env=key_env)
    return ServedTeacher(chosen, vocabulary=VOCABULARY, pause=0.0)


def test_the_log_probs_of_sampled_tokens_come_from_prompt_log_probs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEACHERS_KEY", "k1")
    with served(good) as (address, seen):
        found = teacher(address, key_env="TEACHERS_KEY").teach(rows(), TeacherRequest("sampled"))
    assert found.logp is not None
    assert [row.tolist() for row in found.logp] == [[-1.75, -2.0], [-0.5]]
    assert sorted(body["prompt"] for _, body in seen) == sorted(ROWS)
    for headers, body in seen:
        assert headers["Authorization"] == "Bearer k1"
        assert (body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("wise", 1, 0)


def test_the_likeliest_tokens_come_with_their_tail() -> None:
    with served(good) as (address, seen):
        found = teacher(address).teach(rows(), TeacherRequest("top_k", 2))
    assert found.ids is not None
    assert found.buckets is not None
    # token 7 has -1.75 and token 8 -2, both less than 3 and 4; token 2 has -0.5, as 4 has
    assert [row.tolist() for row in found.ids] == [[[4, 3], [4, 3]], [[2, 4]]]
    rest = torch.tensor([-0.5, -1.5]).exp().sum()
    assert found.buckets[0][0].tolist() == pytest.approx([-0.5, -1.5, (1 - rest).log().item()])
    assert found.buckets[1][0][2] == pytest.approx(torch.tensor(1e-9).log().item())
    assert {body["prompt_logprobs"] for _, body in seen} == {2}


def changed(**entry: Any) -> Reply:
    def reply(body: dict[str, Any]) -> tuple[int, bytes]:
        given = json.loads(good(body)[1])
        given["choices"][0]["prompt_logprobs"][2] = entry["place"]
        return 200, json.dumps(given).encode()

    return reply


OWN = {"logprob": -0.5}
BROKEN: dict[str, Reply] = {
    "no JSON": lambda body: (200, b"<html>"),
    "a status": lambda body: (500, b"{}"),
    "no choice": lambda body: (200, b'{"choices": []}'),
    "no log-probs": lambda body: (200, b'{"choices": [{}]}'),
    "too few": lambda body: (200, b'{"choices": [{"prompt_logprobs": [null]}]}'),
    "no dictionary": changed(place=[1]),
    "another vocabulary": changed(place={"20": {"logprob": -1.0}, "7": OWN, "3": OWN}),
    "no number": changed(place={"7": {"logprob": "x"}}),
    "not a number": changed(place={"7": {"logprob": float("nan")}}),
    "above 0": changed(place={"7": {"logprob": 0.7}}),
    "without the token": changed(place={"9": {"logprob": -0.7}}),
}


@pytest.mark.parametrize("reply", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_reply_goes_to_the_next_server(reply: Reply) -> None:
    with served(reply) as (bad, asked), served(good) as (other, _):
        found = teacher(bad, other).teach(rows(), TeacherRequest("sampled"))
    assert asked, "the broken one was asked, too"
    assert found.logp is not None
    assert [row.tolist() for row in found.logp] == [[-1.75, -2.0], [-0.5]]


def test_without_any_good_reply_the_error_says_what_to_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_teacher, "ATTEMPTS", 2)
    with served(BROKEN["a status"]) as (address, _), pytest.raises(EngineError) as raised:
        teacher(address).teach(rows(), TeacherRequest("top_k", 30))
    said = str(raised.value)
    assert "status 500" in said
    assert "--max-logprobs 30" in said


def test_a_server_that_gives_too_few_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_teacher, "ATTEMPTS", 2)
    with served(good) as (address, _), pytest.raises(EngineError, match="3 log-probs .* 9 were"):
        teacher(address).teach(rows(), TeacherRequest("top_k", 9))


def test_a_key_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHERS_KEY", raising=False)
    with pytest.raises(ConfigError, match="TEACHERS_KEY: this environment variable is not set"):
        teacher("http://h:1", key_env="TEACHERS_KEY")
