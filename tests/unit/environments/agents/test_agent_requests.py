"""Whatever a program sends to the endpoint, it gets an answer or a reason, and the run goes on."""

import gzip
import json
import random
from collections.abc import Callable, Coroutine
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from rftmega.environments.agents.request_shapes import NOT_OFFERED
from tests.unit.environments.agents.test_openai_endpoint import ASKED, TOOLS, Place

CHAT, RESPONSES, TOKENS = "/v1/chat/completions", "/v1/responses", "/inference/v1/generate"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [*ASKED], "tools": TOOLS, "max_tokens": 4, "stream": False},
    RESPONSES: {"input": "1+3?", "instructions": "Add.", "max_output_tokens": 4},
    TOKENS: {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}},
}
DEEP = b"[" * 50_000 + b"]" * 50_000
Post = Callable[..., Coroutine[Any, Any, httpx.Response]]


def posted(folder: Path, work: Callable[[Place, Post], Coroutine[Any, Any, Any]]) -> Place:
    """Runs `work` with what posts to the endpoint of a model that says ab."""
    place = Place(folder, ["ab<|im_end|>"] * 5000)

    async def agent(own: Place) -> None:
        headers = {"Authorization": f"Bearer {own.key}"}
        async with httpx.AsyncClient(headers=headers, base_url=own.url, timeout=60) as client:

            async def post(route: str, body: Any = None, **given: Any) -> httpx.Response:
                if "content" not in given:
                    given["content"] = json.dumps(body).encode()
                return await client.post(route, **given)

            await work(own, post)

    place.run(agent)
    return place


def told(reply: httpx.Response) -> str:
    assert reply.status_code == 400, (reply.status_code, reply.text[:300])
    message = reply.json()["error"]["message"]
    assert isinstance(message, str)
    return message


UNKNOWN_IDS: list[tuple[Any, str]] = [
    ([1, 2, 10**9], "token_ids: 1000000000 is none of the"),
    ([1, 10**5000 // 3 % 10**30], "token_ids"),
    ([-5, 1], "token_ids.0: Input should be greater than or equal to 0, not -5"),
    ([1.7, 2.2], "token_ids.0: Input should be a valid integer"),
    ("123", "token_ids: Input should be a valid list, not '123'"),
    ([True, 3], "token_ids.0: Input should be a valid integer, not True"),
    ([None], "token_ids.0"),
    ([[1]], "token_ids.0"),
    ([], "token_ids: List should have at least 1 item"),
    (None, "token_ids: Input should be a valid list"),
]


def test_token_ids_that_the_model_does_not_know_are_refused(tmp_path: Path) -> None:
    async def work(own: Place, post: Post) -> None:
        for ids, why in UNKNOWN_IDS:
            assert why in told(await post(TOKENS, {"token_ids": ids}))
        size = own.tokenizer.size
        assert "is none of" in told(await post(TOKENS, {"token_ids": [1, size]}))
        assert (await post(TOKENS, {"token_ids": [0, size - 1]})).status_code == 200

    place = posted(tmp_path, work)
    assert len(place.session.trajectories()) == 1


def test_a_limit_of_tokens_is_a_whole_number_above_0(tmp_path: Path) -> None:
    async def work(own: Place, post: Post) -> None:
        for most in (-3, 0, 1.5, "4", True, [1]):
            told(await post(TOKENS, {"token_ids": [1], "sampling_params": {"max_tokens": most}}))
            for name in ("max_tokens", "max_completion_tokens"):
                assert name in told(await post(CHAT, {"messages": ASKED, name: most}))
            assert "max_output_tokens" in told(
                await post(RESPONSES, {"input": "a", "max_output_tokens": most})
            )

    assert posted(tmp_path, work).model.most == []


def test_a_limit_above_what_a_row_may_have_is_that(tmp_path: Path) -> None:
    async def work(own: Place, post: Post) -> None:
        given = {"token_ids": [1], "sampling_params": {"max_tokens": 10**30}}
        assert (await post(TOKENS, given)).status_code == 200

    assert posted(tmp_path, work).model.most == [4000]


UNREADABLE: list[tuple[dict[str, Any], str]] = [
    ({"content": b'{"a": "\xff\xfe"}'}, "UnicodeDecodeError"),
    ({"content": b"{"}, "JSONDecodeError"),
    ({"content": b'{"a": ' + DEEP + b"}"}, "can't be read|levels"),
    ({"content": b'{"a": ' + b"[" * 80 + b"]" * 80 + b"}"}, "more than 64 levels"),
    ({"content": b'{"a": ' + b"9" * 5000 + b"}"}, "ValueError"),
    ({"content": b'{"a": NaN}'}, "NaN is no JSON"),
    ({"content": b'{"a": 1e999}'}, "not JSON compliant"),
    ({"content": b'{"a": "\\ud800"}'}, "UnicodeEncodeError"),
    ({"content": b"[1]"}, "no JSON object"),
    ({"content": b'"a"'}, "no JSON object"),
    ({"content": b"{}", "headers": {"content-type": "application/json; charset=martian"}}, "LookupError"),
    ({"content": b"{}", "headers": {"content-type": "application/json; charset=zip"}}, "LookupError"),
    ({"content": b"{}", "headers": {"content-type": "application/json; charset=idna"}}, "input|messages|token_ids"),
    ({"content": b"not gzip", "headers": {"content-encoding": "gzip"}}, "is no gzip"),
    ({"content": b"", "headers": {"content-encoding": "gzip"}}, "is cut off"),
    ({"content": gzip.compress(b"{}" * 999)[:-9], "headers": {"content-encoding": "gzip"}}, "is cut off"),
    ({"content": b"{}", "headers": {"content-encoding": "martian"}}, "'martian' is not gzip or deflate"),
    ({"content": b""}, "input|messages|token_ids"),
]  # fmt: skip


@pytest.mark.parametrize("route", GOOD)
def test_a_body_that_can_not_be_read_is_the_agents_fault(route: str, tmp_path: Path) -> None:
    async def work(own: Place, post: Post) -> None:
        for given, why in UNREADABLE:
            reply = await post(route, **given)
            assert reply.status_code == 400, (why, reply.text[:300])
            assert any(part in told(reply) for part in why.split("|")), reply.text
            assert (await post(route, GOOD[route])).status_code == 200
        packed = {"content": gzip.compress(json.dumps(GOOD[route]).encode())}
        reply = await post(route, **packed, headers={"content-encoding": "gzip"})
        assert reply.status_code == 200

    posted(tmp_path, work)


@pytest.mark.parametrize("route", GOOD)
def test_parameters_that_nothing_reads_are_refused_by_name(route: str, tmp_path: Path) -> None:
    async def work(own: Place, post: Post) -> None:
        for name in NOT_OFFERED:
            body = json.loads(json.dumps(GOOD[route]))
            inner = body["sampling_params"] if route == TOKENS else body
            for value in (7, [3], {"a": 1}) + ((0,) if name == "seed" else ()):
                inner[name] = value
                assert f"{name}=" in told(await post(route, body))
            inner[name] = None
            assert (await post(route, body)).status_code == 200, name

    posted(tmp_path, work)


def test_unknown_parameters_and_images_of_a_request_in_tokens_are_refused(tmp_path: Path) -> None:
    async def work(own: Place, post: Post) -> None:
        body = {"token_ids": [1], "sampling_params": {"temperatur": 0.1}}
        assert "'temperatur' is not known" in told(await post(TOKENS, body))
        assert "features" in told(await post(TOKENS, {"token_ids": [1], "features": {"a": 1}}))
        assert "stream" in told(await post(TOKENS, {"token_ids": [1], "stream": True}))
        ends = {"stop_token_ids": own.tokenizer.stop_ids}
        assert (await post(TOKENS, {"token_ids": [1], "sampling_params": ends})).status_code == 200

    posted(tmp_path, work)


def test_an_unknown_role_is_refused_by_name(tmp_path: Path) -> None:
    async def work(own: Place, post: Post) -> None:
        roles = ("human", "gpt", "", None, 3, "SYSTEM")
        for role, (route, name) in product(roles, ((CHAT, "messages"), (RESPONSES, "input"))):
            message = told(await post(route, {name: [{"role": role, "content": "a"}]}))
            assert "role: Input should be 'system'" in message
            assert repr(role) in message

    posted(tmp_path, work)


ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 1.5, 10**9, 10**30, 1e300, "", "a", "\x00", "é\U0001f600"),
    *([], {}, [None], [[]], [{}], {"a": 1}, {"type": "text"}, [{"type": "text", "text": 1}], [1, "a"]),
    *({"role": "user"}, [{"role": "tool", "content": None}], {"function": {"name": "a"}}),
    *("<|im_end|>", {"type": "function"}, {"type": "function_call", "call_id": "a"}, "{" * 99),
    [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "9" * 5000}}]}],
    [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[" * 9000}}]}],
    [{"role": "tool", "tool_call_id": "x", "content": ["a", {"type": "image_url"}]}],
]  # fmt: skip
FIELDS = (
    *("messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options"),
    *("response_format", "tool_choice", "temperature", "top_p", "top_k", "n", "logprobs", "model"),
    *("input", "instructions", "previous_response_id", "max_output_tokens", "text", "reasoning"),
    *("token_ids", "sampling_params", "seed", "stop", "user", "metadata", "parallel_tool_calls"),
    *("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content", "type", "id"),
    *("function", "arguments", "call_id", "output", "description", "parameters", "item"),
)


def mutated(draw: random.Random, value: Any, depth: int = 0) -> Any:
    """Returns a body with odd values in odd places."""
    if depth and draw.random() < 0.2:
        return draw.choice(ODD)
    if isinstance(value, dict):
        found = {key: mutated(draw, each, depth + 1) for key, each in value.items()}
        if draw.random() < 0.5:
            found[draw.choice(FIELDS)] = draw.choice(ODD)
        if found and draw.random() < 0.2:
            del found[draw.choice([*found])]
        return found
    if isinstance(value, list):
        found_list = [mutated(draw, each, depth + 1) for each in value]
        return found_list + [draw.choice(ODD)] * (draw.random() < 0.2)
    return value


CONVERSATION = [
    *ASKED,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "4"},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "1+3?"}]},
    {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "c", "output": "4"},
]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.ranks) for n in (1, 2, 3))]
)
def test_no_request_whatever_it_is_gets_a_500(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    bodies: list[tuple[str, Any]] = [
        (CHAT, GOOD[CHAT]),
        (CHAT, GOOD[CHAT] | {"messages": CONVERSATION}),
        (RESPONSES, GOOD[RESPONSES]),
        (RESPONSES, {"input": ITEMS, "tools": [{"type": "function", "name": "add"}]}),
        (TOKENS, GOOD[TOKENS]),
    ]
    seen: dict[int, int] = {}

    async def work(own: Place, post: Post) -> None:
        for _ in range(250):
            route, body = draw.choice(bodies)
            given = mutated(draw, body)
            reply = await post(route, given)
            assert reply.status_code in (200, 400, 404), (reply.status_code, given)
            seen[reply.status_code] = seen.get(reply.status_code, 0) + 1
            content = bytearray(json.dumps(given).encode())
            content[draw.randrange(len(content))] = draw.randrange(256)
            reply = await post(route, content=bytes(content))
            assert reply.status_code in (200, 400, 404), (reply.status_code, bytes(content))

    place = posted(tmp_path, work)
    assert seen[200] > 20 and seen[400] > 50, seen
    size = place.tokenizer.size
    for trajectory in place.session.trajectories():
        assert trajectory.token_ids.min() >= 0 and trajectory.token_ids.max() < size
