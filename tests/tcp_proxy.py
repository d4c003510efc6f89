"""A TCP proxy of the tests, which can be told to misbehave."""

import asyncio
import socket
import struct
import threading
from contextlib import suppress


class TcpProxy:
    """TcpProxy stands before `target` (host, port), and does to what passes as it is told.

    `delay`: seconds before each chunk is handed on. `stuck`: nothing is handed on, and nothing is
    closed, as of a host that is cut off.
    """

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.1"):
        self.target, self.delay, self.stuck = target, 0.0, False
        self._host, self._writers = host, set[asyncio.StreamWriter]()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self.port = 0
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.up()

    @property
    def address(self) -> str:
        return f"http://{self._host}:{self.port}"

    def up(self) -> None:
        self._server = self._ask(asyncio.start_server(self._serve, self._host, self.port))
        self.port = self._server.sockets[0].getsockname()[1]

    def down(self) -> None:
        """Refuses further connections, and closes those there are."""
        assert self._server is not None
        self._loop.call_soon_threadsafe(self._server.close)
        self.cut()

    def cut(self, *, reset: bool = False) -> None:
        """Closes all connections: the other side reads their end, or a reset."""

        async def close() -> None:
            for writer in list(self._writers):
                if reset:
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, linger
                    )
                    writer.transport.abort()
                writer.close()

        self._ask(close())

    def close(self) -> None:
        self.down()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _ask(self, work):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            self._writers |= {writer, far_writer}
            await asyncio.gather(
                self._hand_on(reader, far_writer), self._hand_on(far_reader, writer)
            )
        writer.close()

    async def _hand_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65536):
                if self.delay:
                    await asyncio.sleep(self.delay)
                while self.stuck:
                    await asyncio.sleep(0.05)
                writer.write(chunk)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()
