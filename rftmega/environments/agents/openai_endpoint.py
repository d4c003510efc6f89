"""Endpoint serves the policy through an OpenAI-compatible API to agents, programs that decide
themselves when to call the model.
"""

import asyncio
import concurrent.futures
import json
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from rftmega.core.types import Completion
from rftmega.data.chat.replies import text_of
from rftmega.environments.agents.protocol import RequestRefused, Said
from rftmega.environments.agents.protocol_chat import asked_in_chat, chunks_in_chat, said_in_chat
from rftmega.environments.agents.protocol_responses import (
    asked_in_responses,
    events_in_responses,
    said_in_responses,
)
from rftmega.environments.agents.protocol_tokens import asked_in_tokens
from rftmega.environments.agents.request_shapes import (
    ResponsesRequest,
    body_of,
    checked,
    quoted,
    unpacked,
)
from rftmega.environments.agents.session import Session

if TYPE_CHECKING:
    from aiohttp import web

MODEL = "policy"  # the name under which the model is listed; requests may use any
LARGEST_REQUEST = 2**28  # bytes
Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


class Endpoint:
    """Endpoint is an HTTP server on the loopback interface, in its own thread, for all rollouts of
    a process.

    The API key of a request identifies the rollout to which the request belongs. Tokens are
    generated in the event loop of the rollouts, where the rollout's session lives.
    """

    def __init__(self) -> None:
        """Starts no server; the first call of `open` does."""
        self._sessions: dict[str, Session] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: concurrent.futures.Future[str] | None = None
        self._runner: Any = None
        self.address = ""  # http://127.0.0.1:PORT

    async def open(self, session: Session) -> str:
        """Registers a session, and starts the server if it is not running. Returns the session's
        API key.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # a daemon thread: pending requests don't delay the exit of the process
            threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
            self._starting = asyncio.run_coroutine_threadsafe(self._started(), self._loop)
        # all concurrent rollouts wait for the same start, or fail with it
        assert self._starting is not None
        self.address = await asyncio.shield(asyncio.wrap_future(self._starting))
        key = secrets.token_urlsafe(24)
        self._sessions[key] = session
        return key

    def shut(self, key: str) -> None:
        """Removes a session's API key `key`, so that further requests with it are refused."""
        self._sessions.pop(key, None)

    async def close(self) -> None:
        """Stops the server and its thread."""
        if self._loop is None:
            return
        loop, self._loop, self.address = self._loop, None, ""
        self._sessions.clear()
        ended = asyncio.run_coroutine_threadsafe(self._runner.cleanup(), loop)
        await asyncio.wrap_future(ended)
        loop.call_soon_threadsafe(loop.stop)

    async def _started(self) -> str:
        from aiohttp import web

        application = web.Application(client_max_size=LARGEST_REQUEST)
        application.add_routes(
            [
                web.get("/v1/models", self._guarded(self._models)),
                web.post("/v1/chat/completions", self._guarded(self._chat)),
                web.post("/v1/responses", self._guarded(self._responses)),
                web.post("/inference/v1/generate", self._guarded(self._generate)),
            ]
        )
        # handlers decompress, so that invalid gzip gives an error response instead of a broken
        # connection
        self._runner = web.AppRunner(
            application, access_log=None, shutdown_timeout=1.0, auto_decompress=False
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    def _guarded(self, handler: Callable[..., Awaitable["web.StreamResponse"]]) -> Handler:
        """Returns a request handler that calls `handler` with the session and body of requests with
        a valid key, and refuses all other requests.
        """
        from aiohttp import web

        async def guarded(request: "web.Request") -> "web.StreamResponse":
            session = self._sessions.get(_key(request))
            if session is None:
                refused = RequestRefused("this key opens no rollout", 401, "invalid_api_key")
                return web.json_response(refused.body(), status=401)
            try:
                encoding = request.headers.get("Content-Encoding", "")
                content = unpacked(await request.read(), encoding, LARGEST_REQUEST)
                body = body_of(content, request.charset)
                return await handler(request, session, body)
            except RequestRefused as error:
                return web.json_response(error.body(), status=error.status)

        return guarded

    async def _models(self, request: Any, session: Session, body: Any) -> "web.Response":
        from aiohttp import web

        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rftmega"}
        card["max_model_len"] = session.model.row_tokens
        return web.json_response({"object": "list", "data": [card]})

    async def _chat(self, request: Any, session: Session, body: Any) -> "web.StreamResponse":
        from aiohttp import web

        said: Said = await session.ask_from_outside(body, asked_in_chat(body))
        number = secrets.token_hex(8)
        if not body.get("stream"):
            return web.json_response(said_in_chat(body, said, number))
        lines = [f"data: {json.dumps(each)}\n\n" for each in chunks_in_chat(body, said, number)]
        return await _streamed(request, [*lines, "data: [DONE]\n\n"])

    async def _responses(self, request: Any, session: Session, body: Any) -> "web.StreamResponse":
        from aiohttp import web

        previous = checked(ResponsesRequest, body).previous_response_id or ""
        if previous and previous not in session.responses:
            raise RequestRefused(f"there is no response {quoted(previous)} in this rollout.", 404)
        asked = asked_in_responses(body, session.responses.get(previous, []))
        said: Said = await session.ask_from_outside(body, asked)
        number = secrets.token_hex(8)
        session.responses[f"resp_{number}"] = [*asked.messages, said.message()]
        if not body.get("stream"):
            return web.json_response(said_in_responses(body, said, number))
        events = events_in_responses(body, said, number)
        lines = [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events]
        return await _streamed(request, lines)

    async def _generate(self, request: Any, session: Session, body: Any) -> "web.Response":
        from aiohttp import web

        asked = asked_in_tokens(body, session.renderer)
        completion: Completion = await session.ask_from_outside(
            body.get("sampling_params") or {}, asked
        )
        names = [f"token_id:{each}" for each in completion.token_ids]
        logprobs: list[dict[str, Any]] = [
            {"token": name, "logprob": value, "bytes": None, "top_logprobs": []}
            for name, value in zip(names, completion.logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "logprobs": {"content": logprobs},
            "text": text_of(session.renderer.tokenizer, completion.token_ids),
        }
        return web.json_response({"request_id": secrets.token_hex(8), "choices": [choice]})


def _key(request: Any) -> str:
    """Returns the bearer token of a request; "" if the request has none."""
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    return key if kind == "Bearer" else ""


async def _streamed(request: Any, lines: Iterable[str]) -> "web.StreamResponse":
    """Sends `lines` to the client as server-sent events. Returns the finished response."""
    from aiohttp import web

    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for line in lines:
        await response.write(line.encode())
    await response.write_eof()
    return response
