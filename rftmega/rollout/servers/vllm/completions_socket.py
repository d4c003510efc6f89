"""Serves completion requests over a WebSocket, inside a vLLM server.

vLLM's own endpoint takes one HTTP request per completion, as JSON in both directions, which costs
18 ms of two cores for four tokens, including the engine's own time.
"""

import asyncio
import itertools
from array import array
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from rftmega.rollout.servers.vllm import protocol
from rftmega.weights.receivers.adapter import asked_for

Message = MutableMapping[str, Any]
MESSAGE = 1 << 26  # bytes
_connections = itertools.count()  # numbers of this server's connections


class CompletionsSocket:
    """CompletionsSocket serves completion requests on one WebSocket connection until it is closed;
    unfinished requests are then aborted.
    """

    def __init__(
        self,
        engine: Any,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ):
        """Prepares to serve a connection. `engine`: vLLM's AsyncLLM, which generates; `receive` and
        `send`: ASGI's functions for the connection.
        """
        self.engine, self._receive, self._send = engine, receive, send
        self._name = f"socket-{next(_connections)}"
        self._running: dict[int, asyncio.Task[None]] = {}
        self._replies: list[protocol.ServerReply | protocol.Failure] = []
        self._news = asyncio.Event()

    async def serve(self) -> None:
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})
        sending = asyncio.create_task(self._hand_out())
        try:
            while (message := await self._receive())["type"] == "websocket.receive":
                for said in protocol.asked(message.get("bytes") or message.get("text") or b""):
                    self._handle(said)
        finally:
            tasks = [sending, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _handle(self, said: protocol.Ask | protocol.Cancel) -> None:
        if isinstance(said, protocol.Ask):
            self._running[said.number] = asyncio.create_task(self._reply(said))
        elif task := self._running.pop(said.number, None):
            task.cancel()

    async def _reply(self, ask: protocol.Ask) -> None:
        output = None  # of the engine: errors after it are not the request's fault
        try:
            output = await self._generated(ask)
            reply: protocol.ServerReply | protocol.Failure = _told(ask, output)
        except (VLLMClientError, ValueError, TypeError) as error:
            reply = protocol.Failure(ask.number, str(error), refused=output is None)
        except Exception as error:
            reply = protocol.Failure(ask.number, repr(error), refused=False)
        self._running.pop(ask.number, None)
        self._replies.append(reply)
        self._news.set()

    async def _generated(self, ask: protocol.Ask) -> Any:
        """Generates the completion for the request `ask` and returns vLLM's final output."""
        parameters = SamplingParams(
            **ask.sampling, skip_clone=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        token_ids = protocol.numbers("i", ask.token_ids).tolist()
        prompt = tokens_input(token_ids, cache_salt=ask.salt or None)
        output: Any = None
        answering = self.engine.generate(
            prompt,
            parameters,
            f"{self._name}-{ask.number}",
            lora_request=asked_for(ask.adapter),
        )
        async for each in answering:
            output = each
        return output

    async def _hand_out(self) -> None:
        """Sends the replies of ended requests until cancelled. Replies that become ready during a
        send are sent together in the next message.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            while self._replies:
                replies = self._some()
                await self._send({"type": "websocket.send", "bytes": protocol.packed(replies)})

    def _some(self) -> list[protocol.ServerReply | protocol.Failure]:
        """Removes and returns the replies for the next message: at least one, and about MESSAGE
        bytes at most, since expert routes are large.
        """
        taken: list[protocol.ServerReply | protocol.Failure] = []
        size = 0
        while self._replies and size < MESSAGE:
            reply = self._replies.pop(0)
            size += len(getattr(reply, "routes", b""))
            taken.append(reply)
        return taken


def _told(ask: protocol.Ask, output: Any) -> protocol.ServerReply:
    """Converts `output`, vLLM's final output for the request `ask`, to a ServerReply."""
    choice = output.outputs[0]
    ids = choice.token_ids
    pairs = zip(ids, choice.logprobs or (), strict=True)
    logprobs = array("f", [at[token].logprob for token, at in pairs])
    spans = [(span.version, span.start, span.end) for span in choice.weight_versions or ()]
    told = choice.routed_experts
    routes, shape = b"", list[int]()
    if told is not None:
        kind = "uint8" if told.dtype == "uint8" else "int16"
        routes, shape = told.astype(kind).tobytes(), list(told.shape)
    return protocol.ServerReply(
        protocol.renumbered(ask.number, output.prompt_token_ids),
        protocol.integers(ids),
        logprobs.tobytes(),
        str(choice.finish_reason),
        spans,
        routes,
        shape,
    )
