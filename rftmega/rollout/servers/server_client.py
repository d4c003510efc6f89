"""ServerClient speaks to one vLLM server, wherever it runs."""

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx

from rftmega.core.errors import EngineError, EngineFault
from rftmega.rollout.servers.connection import CompletionRefused, Disconnected, ServerConnection
from rftmega.rollout.servers.protocol import http_reply, weight_version
from rftmega.rollout.servers.protocol.claims import refuse_taken
from rftmega.rollout.servers.protocol.http_reply import HTTPReply
from rftmega.rollout.servers.vllm import auth, ownership, protocol

START_SECONDS = 600.0
CONTROL_SECONDS = 60.0  # for what takes no time: who needs longer hangs
LONG_SECONDS = 600.0  # for what moves weights, or waits for answers
EXPECT = "init_weight_transfer_engine"
HEALTH_SECONDS = 5.0  # that it may take to say that it is there
PROBE_SECONDS = 5.0  # for one token: who needs longer is hung
# what servers say of what they did, and of what they generated
DONE = {"status", "success", "message", "results", "choices", "meta_info"}
REFUSALS = (400, 413, 422)  # statuses of a request that would be refused everywhere
PAUSES = {  # rollout.on_update -> how a server stops for new weights
    "wait": "pause?mode=wait",
    "abort": "pause?mode=abort",
    "recompute": "pause?mode=keep&clear_cache=true",
    "keep": "pause?mode=keep&clear_cache=false",
}


Told = TypeVar("Told", str, int)


class Connections(NamedTuple):
    """The HTTP client and the WebSocket of one event loop to one server."""

    server: "ServerClient"
    client: httpx.AsyncClient
    socket: ServerConnection

    async def close(self) -> None:
        await self.socket.close()
        await self.client.aclose()


class ServerClient:
    """ServerClient is a server as the trainer knows it: its address, and what it can be asked.

    This one was started by somebody else, who ends it and starts it again.
    """

    own = False  # whether this process started it
    generates = "inference/v1/generate"  # the path of requests over HTTP
    kind = "vLLM"
    long: tuple[str, ...] = ("update_weights", "collective_rpc", EXPECT, "pause?mode=wait")  # paths
    wordless: tuple[str, ...] = ()  # paths whose reply has nothing in it
    updating = False  # whether it has begun to take a push, and not ended
    run = ""  # whose pushes it takes

    def __init__(
        self, address: str, headers: Mapping[str, str], *, tls: ssl.SSLContext | None = None
    ):
        """`address`: http://HOST:PORT, or https. `tls`: whose certificates are believed."""
        self.address, self.headers, self.tls = address, dict(headers), tls

    @property
    def host(self) -> str:
        """Returns the address of its host."""
        return urlsplit(self.address).hostname or ""

    @property
    def verified(self) -> ssl.SSLContext | bool:
        """Returns how its certificate is checked."""
        return self.tls or self.address.startswith("https:")

    @property
    def alive(self) -> bool:
        """Says whether it may answer: of a server elsewhere nobody knows before it is asked."""
        return True

    def wait(self) -> None:
        """Waits until it answers. Raises EngineFault where it does not come up in START_SECONDS."""
        begin = time.monotonic()
        while time.monotonic() - begin < START_SECONDS:
            if self.there():
                return
            time.sleep(0.2)
        raise self.fault(f"did not come up in {START_SECONDS:g} s")

    def there(self) -> bool:
        """Returns whether it answers.

        Raises EngineError where it does not take the key.
        """
        try:
            reply = self._asked("GET", "/health", HEALTH_SECONDS)
        except EngineFault:
            return False
        if reply.status == httpx.codes.UNAUTHORIZED:
            raise EngineError(
                f"The server at {self.address} does not take the key. Give it and the trainer the same {auth.KEY}."
            )
        return reply.status == httpx.codes.OK

    def post(
        self, path: str, body: dict[str, Any] | None = None, seconds: float | None = None
    ) -> None:
        """Raises EngineError where it answers with an error, EngineFault where it does not answer."""
        limit = seconds or (LONG_SECONDS if path in self.long else CONTROL_SECONDS)
        self._post(path, limit, json=body)

    def _post(self, path: str, seconds: float, **content: Any) -> None:
        reply = self._asked("POST", f"/{path}", seconds, **content)
        if reply.status != httpx.codes.OK:
            raise EngineError(
                f"The {self.kind} server at {self.address} failed in {path}: {reply}. {self.last_words()}"
            )
        if path not in self.wordless or reply.body:
            said = self._read(path, reply)
            if said.get("success") is False or not DONE & said.keys():
                raise EngineError(
                    f"The {self.kind} server at {self.address} did not do {path}: {reply}. {self.last_words()}"
                )

    def told(
        self,
        path: str,
        parameters: Mapping[str, Any] | None = None,
        seconds: float = CONTROL_SECONDS,
    ) -> dict[str, Any]:
        """Returns the object that it tells at this path. Raises EngineFault where it does not in
        `seconds`, or tells something else.
        """
        reply = self._asked("GET", path, seconds, params=parameters)
        if reply.status != httpx.codes.OK:
            raise self.fault(f"failed in {path}: {reply}")
        return self._read(path, reply)

    def samples(self, tokens: Mapping[str, int]) -> dict[str, str]:
        """Returns checksums of what the server makes of sample images (`images.samples_of_vllm`).

        Raises EngineFault where it does not answer.
        """
        found = self.told(auth.SAMPLES, dict(tokens))
        return {kind: str(checksum) for kind, checksum in found.items()}

    def refuse_other_version(self) -> None:
        """Raises EngineError where it runs another version of vLLM than the trainer has."""
        from vllm import __version__ as version

        theirs = self.told("/version").get("version")
        if theirs != version:
            raise EngineError(
                f"The server at {self.address} runs vLLM {theirs}, and the trainer's is {version}: their log-probs and their "
                "transport of weights may differ. Install the same version on both."
            )

    def identity(self) -> str:
        """Returns what is another one after each start, and under each owner. Raises EngineFault where
        it does not tell.
        """
        return self._told_of(auth.IDENTITY, "identity", str)

    def workers(self) -> int:
        """Returns how many processes its model has. Raises EngineFault where it does not tell."""
        return self._told_of("/get_world_size", "world_size", int)

    def claim(self, name: str) -> None:
        """Takes it for `run`, whose `name` others are told; again and again, so that it stays taken.

        Raises ServerTaken where it is another run's.
        """
        told = {"run": self.run, "name": name}
        reply = self._asked("POST", ownership.OWNER, HEALTH_SECONDS, json=told)
        refuse_taken(self.address, reply)
        if reply.status != httpx.codes.OK:
            raise self.fault(f"failed in {ownership.OWNER}: {reply}")
        self._read(ownership.OWNER, reply)

    def release(self) -> None:
        """Leaves it to other runs."""
        self.post(ownership.OWNER[1:], {"run": self.run, "name": ""}, HEALTH_SECONDS)

    # how it takes a push; each raises EngineError where it does not

    def stop(self, on_update: str) -> None:
        """Has it stop for new weights, as `rollout.on_update` says."""
        self.post(PAUSES[on_update])

    def join(self, init_info: dict[str, Any]) -> None:
        """Tells it how weights will come."""
        self.post(EXPECT, {"init_info": init_info})

    def take(self, update_info: dict[str, Any]) -> None:
        """Has it take the weights of a push."""
        if self.updating:  # one broke off; a worker that failed has ended it
            with suppress(EngineError):
                self.post("finish_weight_update")
        self.updating = True
        self.post("start_weight_update")
        self.post("update_weights", {"update_info": update_info})

    def land(self, version: int) -> None:
        """Has it answer under a push that it took."""
        self.post("finish_weight_update", {"weight_version": self.named(version)})
        self.updating = False
        self.post("resume")

    def land_adapters(self, version: int, payload: bytes) -> None:
        """Has it answer with these adapters, beside the weights that it took, or has."""
        if self.updating:
            self.post("finish_weight_update")  # first: it drops all adapters
            self.updating = False
        told = {"version": version}
        self._post(auth.ADAPTER[1:], LONG_SECONDS, content=payload, params=told)
        self.post("update_weight_version", {"new_version": self.named(version)})
        self.post("resume")

    def named(self, version: int) -> str:
        """Returns what it is told that it answers under."""
        return weight_version.named(version, self.run)

    def abort_all(self, seconds: float = CONTROL_SECONDS) -> None:
        """Breaks off whatever it generates."""
        self.post("abort_requests", {}, seconds)

    def probe(self, *, paused: bool = False) -> None:
        """Asks for one token; where it is `paused` for a push, whether it is, since it may hold half
        of the weights. Raises EngineError where the answer does not come in PROBE_SECONDS.
        """
        if paused:
            self.told("/is_paused", seconds=PROBE_SECONDS)
            return
        sampling = {"max_tokens": 1, "temperature": 0.0}
        body = {"token_ids": [0], "sampling_params": sampling}
        self.post(self.generates, body, PROBE_SECONDS)

    async def generate(
        self, connections: Connections, body: dict[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Returns the reply to a request with one choice, as the server gives it.

        Raises EngineFault where it breaks off, fails, needs over `seconds` or replies with no object.
        """
        try:
            async with asyncio.timeout(seconds):
                response = await connections.client.post(
                    f"{self.address}/{self.generates}", json=body, headers=self.headers
                )
        except TimeoutError as error:
            raise self._late(seconds) from error
        except http_reply.BROKEN as error:
            raise self.fault(f"broke off ({error!r})") from error
        reply = HTTPReply(response.status_code, response.content)
        if reply.status in REFUSALS:
            raise self._refused(str(reply))
        if reply.status != httpx.codes.OK:
            raise self.fault(f"failed while generating: {reply}")
        return self._read(self.generates, reply)

    async def ask(
        self,
        connections: Connections,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        seconds: float,
        *,
        salt: str = "",
        adapter: int = 0,
    ) -> protocol.ServerReply:
        """Returns the completion of these tokens; see ServerConnection.ask. `sampling`: what vLLM's
        SamplingParams takes.

        Raises EngineFault where it breaks off, fails or needs over `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):
                return await connections.socket.ask(token_ids, sampling, salt=salt, adapter=adapter)
        except TimeoutError as error:
            raise self._late(seconds) from error
        except Disconnected as error:
            raise self.fault(str(error)) from error
        except CompletionRefused as error:
            raise self._refused(str(error)) from error
        except EngineError as error:
            raise self.fault(f"failed while generating: {error}") from error

    def connections(self) -> Connections:
        """Returns the connections of one event loop; nothing is opened yet."""
        limits = httpx.Limits(max_connections=None)
        timeout = httpx.Timeout(None, connect=30.0)
        # trust_env=False: no proxy may see the key
        client = httpx.AsyncClient(
            timeout=timeout, limits=limits, trust_env=False, verify=self.verified
        )
        return Connections(self, client, ServerConnection(self.address, self.headers, tls=self.tls))

    def close(self) -> None:
        """Leaves it as it is, but for what it was asked to generate, to whoever comes next."""
        with suppress(EngineError):
            self.abort_all(PROBE_SECONDS)
            self.release()

    def fault(self, what: str) -> EngineFault:
        return EngineFault(f"The {self.kind} server at {self.address} {what}. {self.last_words()}")

    def last_words(self) -> str:
        """Returns what is known of why."""
        return "Its log is where it was started."

    def _asked(self, method: str, path: str, seconds: float, **content: Any) -> HTTPReply:
        try:
            return http_reply.asked(
                method,
                f"{self.address}{path}",
                seconds,
                headers=self.headers,
                verify=self.verified,
                **content,
            )
        except http_reply.BROKEN as error:
            raise self.fault(f"does not answer ({error!r})") from error

    def _read(self, path: str, reply: HTTPReply) -> dict[str, Any]:
        """Returns the object in a reply. Raises EngineFault where it has none."""
        try:
            return reply.read()
        except ValueError as error:
            raise self.fault(
                f"answered {path} with what is no object of JSON ({error}): {reply}"
            ) from error

    def _told_of(self, path: str, name: str, kind: type[Told]) -> Told:
        """Returns one thing that it tells. Raises EngineFault where it is not of this kind."""
        found = self.told(path).get(name)
        if type(found) is not kind or not found:
            raise self.fault(f"answered {path} without its {name}")
        return found

    def _late(self, seconds: float) -> EngineFault:
        return self.fault(f"gave no answer in {seconds:g} s (rollout.deadline_seconds)")

    def _refused(self, why: str) -> EngineError:
        return EngineError(f"The {self.kind} server at {self.address} refused a prompt: {why}")
