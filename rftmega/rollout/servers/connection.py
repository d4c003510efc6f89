"""WebSocket connection to one server that carries many requests at the same time."""

import asyncio
import itertools
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from rftmega.core.errors import EngineError
from rftmega.rollout.servers.vllm import protocol

OPEN_SECONDS = 30.0
LARGEST = 2**30  # bytes of a message
CLOSE_SECONDS = 1.0  # for the closing handshake
PING_SECONDS = 30.0  # between two pings; a dead host is detected after as long again
REMEMBERED = 10_000  # cancelled requests, whose replies may still arrive


class Disconnected(ConnectionError):
    """Disconnected is raised if a connection can't be opened or is lost."""


class CompletionRefused(EngineError):
    """CompletionRefused is raised if a server refuses a request as invalid; every server would
    refuse it.
    """


class ServerConnection:
    """ServerConnection is one WebSocket to a server that carries many completion requests at a
    time, for use in one event loop. It is opened at the first request.
    """

    def __init__(
        self, address: str, headers: Mapping[str, str], *, tls: ssl.SSLContext | None = None
    ):
        """Stores the address without connecting. `address`: the server's http or https URL;
        `headers`: HTTP headers of the handshake, which authenticate; `tls`: the trusted
        certificates for https, None for the system's.
        """
        self._tls = tls
        self._url = "ws" + address.removeprefix("http") + protocol.SOCKET
        self._headers = dict(headers)
        self._socket: ClientConnection | None = None
        self._reading: asyncio.Task[None] | None = None
        self._sequence = itertools.count()
        self._waiting: dict[int, asyncio.Future[protocol.ServerReply]] = {}
        self._taken_back = deque[int](maxlen=REMEMBERED)
        self._unsent: list[protocol.Ask | protocol.Cancel] = []
        self._sending: asyncio.Task[None] | None = None

    async def ask(
        self,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        salt: str = "",
        adapter: int = 0,
    ) -> protocol.ServerReply:
        """Requests a completion of `token_ids` and returns the server's reply. Cancelling the call
        cancels the request on the server. `sampling`: arguments of vLLM's SamplingParams; `salt`:
        requests with different salts share no prefix cache; `adapter`: number of the LoRA adapter,
        0 for the base model.

        Raises Disconnected if the connection can't be opened or breaks; CompletionRefused if the
        request is invalid; EngineError if the server fails otherwise.
        """
        prompt = protocol.integers(token_ids)
        number = protocol.numbered(next(self._sequence), prompt)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._say(protocol.Ask(number, prompt, dict(sampling), salt, adapter))
        try:
            return await reply
        except asyncio.CancelledError:
            self._taken_back.append(number)
            self._say(protocol.Cancel(number))
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Closes the connection; pending requests raise Disconnected."""
        tasks = [task for task in (self._sending, self._reading) if task is not None]
        self._sending = self._reading = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            with suppress(OSError, WebSocketException):
                await self._socket.close()
        self._broke("was closed")

    async def _open(self) -> None:
        try:
            self._socket = await connect(
                self._url,
                additional_headers=self._headers,
                compression=None,
                max_size=LARGEST,
                open_timeout=OPEN_SECONDS,
                close_timeout=CLOSE_SECONDS,
                ping_interval=PING_SECONDS,
                ping_timeout=PING_SECONDS,
                proxy=None,  # no proxy may see the key
                ssl=(self._tls or True) if self._url.startswith("wss:") else None,
            )
        except (
            OSError,
            WebSocketException,
            ValueError,
        ) as error:  # including a reply that is no HTTP
            self._broke(f"can't be reached ({error!r})")
        else:
            self._reading = asyncio.create_task(self._read(self._socket))

    def _say(self, message: protocol.Ask | protocol.Cancel) -> None:
        """Queues a message for sending. All queued messages are sent together in one WebSocket
        message, since each send costs more than its content.
        """
        self._unsent.append(message)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        if self._socket is None:
            await self._open()
        while self._unsent and self._socket is not None:
            messages, self._unsent = self._unsent, []
            with suppress(WebSocketException, OSError):  # reported by `_read`
                await self._socket.send(protocol.packed(messages))

    async def _read(self, socket: ClientConnection) -> None:
        try:
            async for message in socket:
                for reply in protocol.answered(message):
                    self._told(reply)
            self._broke("closed the connection")
        except protocol.ProtocolError as error:  # nothing behind it can be trusted
            self._broke(f"sent what is no answer ({error})")
            with suppress(OSError, WebSocketException):
                await socket.close()
        except (OSError, WebSocketException) as error:
            self._broke(f"broke off ({error!r})")

    def _told(self, reply: protocol.ServerReply | protocol.Failure) -> None:
        """Passes a server's reply to the `ask` call that waits for it; ignores the reply to a
        cancelled request. Raises ProtocolError for a reply to an unknown request.
        """
        waiting = self._waiting.get(reply.number)
        if waiting is None or waiting.done():
            if reply.number in self._taken_back or (waiting is not None and waiting.cancelled()):
                return
            raise protocol.ProtocolError(f"nobody waits for number {reply.number} and its prompt")
        if isinstance(reply, protocol.ServerReply):
            waiting.set_result(reply)
        elif reply.refused:
            waiting.set_exception(CompletionRefused(reply.error))
        else:
            waiting.set_exception(EngineError(reply.error))

    def _broke(self, what: str) -> None:
        self._socket = None
        self._unsent.clear()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Disconnected(what))
