import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web

from rftmega.config.options.tools import HTTPTool, ToolLimits
from rftmega.core.errors import ConfigError, InfrastructureFault
from rftmega.environments.tools.http_tool import LARGEST_REPLY, HTTPTools
from rftmega.environments.tools.tool_runner import ToolReply
from tests.unit.environments.tools.tool_calls import running

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LIMITS = ToolLimits(seconds=60, retries=2, pause=0.001, characters=LARGEST_REPLY)
Say = Callable[[web.Request], Awaitable[web.Response]]


@asynccontextmanager
async def served(say: Say) -> AsyncIterator[str]:
    """Yields the address of a server that `say` speaks for."""
    app = web.Application()
    app.router.add_post("/tool", say)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/tool"
    finally:
        await runner.cleanup()


def answered(
    say: Say, *arguments: Any, limits: ToolLimits = LIMITS, **options: Any
) -> tuple[list[ToolReply], dict[str, float]]:
    """Returns the replies of a tool that `say` speaks for, and what was counted."""

    async def work() -> tuple[list[ToolReply], dict[str, float]]:
        async with served(say) as url:
            toolset = HTTPTools([HTTPTool("look", "Looks.", url, CITY, **options)])
            async with running(toolset, limits=limits) as runner:
                replies = [await runner.call("look", each) for each in arguments]
                return replies, runner.measures

    return asyncio.run(work())


def in_turn(*replies: tuple[int, str]) -> Say:
    """Answers with one (status, text) after another, the last again and again."""
    left = list(replies)

    async def say(request: web.Request) -> web.Response:
        status, text = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=status, text=text)

    return say


def test_arguments_are_posted_as_json_and_the_body_is_the_reply() -> None:
    heard = []

    async def say(request: web.Request) -> web.Response:
        heard.append(
            (await request.json(), request.content_type, "authorization" in request.headers)
        )
        return web.json_response(
            {"weather": "süß"}, dumps=lambda each: json.dumps(each, ensure_ascii=False)
        )

    (reply,), counted = answered(say, {"city": "R\ud800me"})
    assert (reply.text, reply.failed) == ('{"weather": "süß"}', False)
    assert heard == [({"city": "R\ud800me"}, "application/json", False)]
    assert (counted["tool_calls"], counted["tool_errors"]) == (1, 0)


def test_a_key_of_the_environment_is_sent_and_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cr3t")
    heard = []

    async def say(request: web.Request) -> web.Response:
        heard.append(request.headers["authorization"])
        return web.Response(status=500, text="broken")

    with pytest.raises(InfrastructureFault) as raised:
        answered(say, {"city": "a"}, key_env="MY_KEY")
    assert heard == ["Bearer s3cr3t"]
    assert "s3cr3t" not in str(raised.value)


def test_status_4xx_is_the_models_failure() -> None:
    (told, silent), counted = answered(
        in_turn((404, "no such city"), (400, "")), {"city": "a"}, {"city": "b"}, idempotent=True
    )
    assert (told.text, told.failed) == ("error: no such city", True)
    assert (silent.text, silent.failed) == ("error: status 400", True)
    assert (counted["tool_errors"], counted["tool_retries"]) == (2, 0)


@pytest.mark.parametrize("status", [429, 500, 503, 302])
def test_other_failures_are_faults_which_only_idempotent_tools_try_again(status: int) -> None:
    say = in_turn((status, "later"), (status, "later"), (200, "fine"))
    (reply,), counted = answered(say, {"city": "a"}, idempotent=True)
    assert (reply.text, counted["tool_retries"], counted["tool_errors"]) == ("fine", 2, 0)
    with pytest.raises(InfrastructureFault, match=f"status {status}: 'later'"):
        answered(in_turn((status, "later"), (200, "fine")), {"city": "a"})


def test_a_server_that_is_gone_is_a_fault() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"

    async def work() -> None:
        async with running(HTTPTools([HTTPTool("look", "Looks.", url)])) as runner:
            await runner.call("look", {})

    with pytest.raises(InfrastructureFault, match="gave no answer: ConnectError"):
        asyncio.run(work())


def test_a_connection_that_breaks_off_is_a_fault() -> None:
    async def say(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    with pytest.raises(InfrastructureFault, match="gave no answer"):
        answered(say, {"city": "a"})


def says(body: bytes, **headers: str) -> Say:
    """Answers with these bytes, whatever its headers say of them."""

    async def say(request: web.Request) -> web.Response:
        return web.Response(body=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return say


@pytest.mark.parametrize(
    ("say", "why"),
    [
        (says(b"no gzip", content_encoding="gzip"), "DecodingError"),
        (says(b"no deflate", content_encoding="deflate"), "DecodingError"),
        (says(b"x\xff" * 100, content_type="text/plain; charset=idna"), "UnicodeError"),
        (says(b"x\xff" * 100, content_type="text/plain; charset=punycode"), "Error"),
    ],
)
def test_a_reply_that_can_not_be_decoded_is_a_fault(say: Say, why: str) -> None:
    with pytest.raises(InfrastructureFault, match=f"The tool look gave no answer: .*{why}"):
        answered(say, {"city": "Rome"})


@pytest.mark.parametrize(
    "error",
    [
        httpx.InvalidURL("no address"),
        httpx.TooManyRedirects("round and round"),
        httpx.StreamClosed(),
        UnicodeError("no host's name"),
        OSError("no files left"),
        RuntimeError("the client is closed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_the_client_raises_is_a_fault(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream(*given: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(httpx.AsyncClient, "stream", stream)
    with pytest.raises(InfrastructureFault, match=f"{type(error).__name__}: {error}"):
        answered(in_turn((200, "rain")), {"city": "Rome"})


def test_a_server_that_is_late_is_a_fault_by_the_tools_own_limit() -> None:
    async def say(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    with pytest.raises(InfrastructureFault, match=r"look gave no reply within 0\.05 s"):
        answered(say, {"city": "a"}, seconds=0.05)


def test_a_reply_without_end_is_cut() -> None:
    async def say(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * (2 * LARGEST_REPLY))

    (reply,), _ = answered(say, {"city": "a"})
    assert reply.text == "x" * LARGEST_REPLY


def test_a_number_that_json_has_not_is_the_models_failure() -> None:
    (reply,), _ = answered(in_turn((200, "")), {"city": "a", "n": float("nan")})
    assert reply.failed and "wrong arguments of look" in reply.text


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (HTTPTool("", "b", "http://x"), "without a name.*name is empty"),
        (HTTPTool("a", "", "http://x"), "description is empty"),
        (HTTPTool("a", "b", ""), "url is empty"),
        (HTTPTool("a", "b", "ftp://x"), "url must be http"),
        (HTTPTool("a", "b", "http://x:port"), "url must be http"),
        (HTTPTool("a", "b", "http://me:s3cr3t@x"), "holds a user or a password"),
        (HTTPTool("a", "b", "http://x", {"type": "list"}), "no JSON schema"),
        (
            HTTPTool("a", "b", "http://x", key_env="NOT_SET_ANYWHERE"),
            "NOT_SET_ANYWHERE .* is not set",
        ),
    ],
)
def test_options_that_can_not_work_are_refused(tool: HTTPTool, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        HTTPTools([tool])
    assert "s3cr3t" not in str(raised.value)
