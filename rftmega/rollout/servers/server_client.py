"""Client of one vLLM server over HTTP and WebSocket."""

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
CONTROL_SECONDS = 60.0  # for quick requests: a server that needs longer hangs
LONG_SECONDS = 600.0  # for requests that move weights or wait for completions
EXPECT = "init_weight_transfer_engine"
HEALTH_SECONDS = 5.0  # for a health check
PROBE_SECONDS = 5.0  # for one token: a server that needs longer hangs
# keys of a reply to a successful request
DONE = {"status", "success", "message", "results", "choices", "meta_info"}
REFUSALS = (400, 413, 422)  # statuses of requests that every server would refuse
PAUSES = {  # rollout.on_update -> request that pauses a server for new weights
    "wait": "pause?mode=wait",
    "abort": "pause?mode=abort",
    "recompute": "pause?mode=keep&clear_cache=true",
    "keep": "pause?mode=keep&clear_cache=false",
}


Told = TypeVar("Told", str, int)


class Connections(NamedTuple):
    """Connections holds one server's HTTP client and WebSocket, for use in one event loop."""

    server: "ServerClient"
    client: httpx.AsyncClient
    socket: ServerConnection

    async def close(self) -> None:
        await self.socket.close()
        await self.client.aclose()


class ServerClient:
    """ServerClient is the trainer's client of one vLLM server that runs this package: it sends
    requests, weights and health checks to the server's address.

    This class itself is for servers that the run does not start; subclasses are for others.
    """

    own = False  # whether this process started it
    generates = "inference/v1/generate"  # path of completion requests over HTTP
    kind = "vLLM"
    long: tuple[str, ...] = (
        "update_weights",
        "collective_rpc",
        EXPECT,
        "pause?mode=wait",
    )  # paths of slow requests
    wordless: tuple[str, ...] = ()  # paths whose reply may be empty
    updating = False  # whether it has begun to take a push without ending it
    run = ""  # the run whose pushes it takes

    def __init__(
        self, address: str, headers: Mapping[str, str], *, tls: ssl.SSLContext | None = None
    ):
        """Stores the address without connecting. `address`: the server's URL, http://HOST:PORT or
        https. `headers`: sent with every request, with the authentication key. `tls`: the trusted
        certificates; None for the system's.
        """
        self.address, self.headers, self.tls = address, dict(headers), tls

    @property
    def host(self) -> str:
        """Returns the host part of the server's address."""
        return urlsplit(self.address).hostname or ""

    @property
    def verified(self) -> ssl.SSLContext | bool:
        """Returns httpx's argument `verify`, by which the server's certificate is checked."""
        return self.tls or self.address.startswith("https:")

    @property
    def alive(self) -> bool:
        """Returns whether the server's process may be running: always True here, as only a request
        to the remote server can tell.
        """
        return True

    def wait(self) -> None:
        """Waits until the server responds. Raises EngineFault if it does not respond within
        START_SECONDS.
        """
        begin = time.monotonic()
        while time.monotonic() - begin < START_SECONDS:
            if self.there():
                return
            time.sleep(0.2)
        raise self.fault(f"did not come up in {START_SECONDS:g} s")

    def there(self) -> bool:
        """Returns whether the server responds to a health check.

        Raises EngineError if the server rejects the authentication key.
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
        """Sends a POST request to `path` with the JSON `body`. `seconds`: time limit; None:
        LONG_SECONDS for slow requests (`long`), else CONTROL_SECONDS. Raises EngineError if the
        reply is an error, EngineFault if there is no reply.
        """
        limit = seconds or (LONG_SECONDS if path in self.long else CONTROL_SECONDS)
        self._post(path, limit, json=body)

    def _post(self, path: str, seconds: float, **content: Any) -> None:
        reply = self._asked("POST", f"/{path}", seconds, **content)
        if reply.status != httpx.codes.OK:
            raise EngineError(
                f"The {self.kind} server at {self.address} failed in {path}: {reply}. {self.log_tail()}"
            )
        if path not in self.wordless or reply.body:
            said = self._read(path, reply)
            if said.get("success") is False or not DONE & said.keys():
                raise EngineError(
                    f"The {self.kind} server at {self.address} did not do {path}: {reply}. {self.log_tail()}"
                )

    def told(
        self,
        path: str,
        parameters: Mapping[str, Any] | None = None,
        seconds: float = CONTROL_SECONDS,
    ) -> dict[str, Any]:
        """Sends a GET request to `path` with the query `parameters` and returns the JSON object in
        the reply. Raises EngineFault if the request fails, takes longer than `seconds` or returns
        no JSON object.
        """
        reply = self._asked("GET", path, seconds, params=parameters)
        if reply.status != httpx.codes.OK:
            raise self.fault(f"failed in {path}: {reply}")
        return self._read(path, reply)

    def samples(self, tokens: Mapping[str, int]) -> dict[str, str]:
        """Returns checksums of the patches that the server's preprocessing makes of a built-in
        sample image and video, by media kind (`image_prompts.samples_of_vllm`). `tokens`:
        placeholder token of each media kind ("image", "video").

        Raises EngineFault if the server does not respond.
        """
        found = self.told(auth.SAMPLES, dict(tokens))
        return {kind: str(checksum) for kind, checksum in found.items()}

    def refuse_other_version(self) -> None:
        """Raises EngineError if the server runs another vLLM version than the trainer."""
        from vllm import __version__ as version

        theirs = self.told("/version").get("version")
        if theirs != version:
            raise EngineError(
                f"The server at {self.address} runs vLLM {theirs}, and the trainer's is {version}: their log-probs and their "
                "transport of weights may differ. Install the same version on both."
            )

    def identity(self) -> str:
        """Returns an id that the server reports and that changes when it restarts or gets another
        owner (run). Raises EngineFault if the reply lacks the id.
        """
        return self._told_of(auth.IDENTITY, "identity", str)

    def draft_counts(self, positions: int) -> list[int]:
        """Returns the server's drafts and accepted tokens since the last request, by position
        (`DraftCounts.take`). Raises EngineFault if the reply has other content, as that of a
        server without speculative decoding.
        """
        counts = self.told(auth.DRAFTS, {"positions": positions}).get("counts")
        if (
            not isinstance(counts, list)
            or len(counts) != 2 * positions
            or not all(map(_is_count, counts))
        ):
            raise self.fault(f"answered {auth.DRAFTS} without {2 * positions} counts")
        return counts

    def workers(self) -> int:
        """Returns the number of the server's vLLM workers (model processes). Raises EngineFault if
        the reply lacks the number.
        """
        return self._told_of("/get_world_size", "world_size", int)

    def claim(self, name: str) -> None:
        """Takes the lease of the server for this run, or renews it; the server then refuses other
        runs. `name`: description of this run, shown to other runs.

        Raises ServerTaken if another run holds the server.
        """
        told = {"run": self.run, "name": name}
        reply = self._asked("POST", ownership.OWNER, HEALTH_SECONDS, json=told)
        refuse_taken(self.address, reply)
        if reply.status != httpx.codes.OK:
            raise self.fault(f"failed in {ownership.OWNER}: {reply}")
        self._read(ownership.OWNER, reply)

    def release(self) -> None:
        """Ends this run's lease, so that other runs can claim the server."""
        self.post(ownership.OWNER[1:], {"run": self.run, "name": ""}, HEALTH_SECONDS)

    # steps of a push; each raises EngineError if it fails

    def stop(self, on_update: str) -> None:
        """Pauses generation on the server before a push. `on_update`: the option rollout.on_update,
        which decides whether running requests end first, are aborted, or continue after the push.
        """
        self.post(PAUSES[on_update])

    def join(self, init_info: dict[str, Any]) -> None:
        """Prepares the server for pushes. `init_info`: arguments of vLLM's
        `init_weight_transfer_engine`, which depend on the transport, e.g. tensor names or the
        address of a process group.
        """
        self.post(EXPECT, {"init_info": init_info})

    def take(self, update_info: dict[str, Any]) -> None:
        """Makes the server receive the weights of a push and returns when it has them.
        `update_info`: arguments of vLLM's `update_weights`, which depend on the transport.
        """
        if self.updating:  # an earlier push broke off; a failed worker may have ended it
            with suppress(EngineError):
                self.post("finish_weight_update")
        self.updating = True
        self.post("start_weight_update")
        self.post("update_weights", {"update_info": update_info})

    def land(self, version: int) -> None:
        """Ends the transfer of weights of version `version`, and resumes generation with them."""
        self.post("finish_weight_update", {"weight_version": self.named(version)})
        self.updating = False
        self.post("resume")

    def land_adapters(self, version: int, payload: bytes) -> None:
        """Loads the LoRA adapters of version `version`, serialised in `payload`, on top of the base
        model, and resumes generation.
        """
        if self.updating:
            self.post("finish_weight_update")  # first, since it drops all adapters
            self.updating = False
        told = {"version": version}
        self._post(auth.ADAPTER[1:], LONG_SECONDS, content=payload, params=told)
        self.post("update_weight_version", {"new_version": self.named(version)})
        self.post("resume")

    def named(self, version: int) -> str:
        """Returns the version string under which the server reports the weights of version
        `version`.
        """
        return weight_version.named(version, self.run)

    def abort_all(self, seconds: float = CONTROL_SECONDS) -> None:
        """Aborts all running requests of the server. `seconds`: time limit of the call."""
        self.post("abort_requests", {}, seconds)

    def probe(self, *, paused: bool = False) -> None:
        """Tests whether the server works: requests a completion of one token or, if the server is
        `paused` for a push, only a status, since its weights may be half replaced. Raises
        EngineError if there is no valid reply within PROBE_SECONDS.
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
        """Sends a completion request over HTTP and returns the server's reply, a JSON object.
        `connections`: this server's clients for the running event loop; `body`: the request's JSON;
        `seconds`: time limit.

        Raises EngineFault if the server breaks off, fails, exceeds `seconds` or sends no JSON
        object; EngineError if it refuses the request.
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
        """Requests a completion of `token_ids` over the WebSocket, and returns the reply.
        `connections`: this server's clients for the running event loop; `sampling`: arguments of
        vLLM's SamplingParams; `seconds`: time limit. `salt`, `adapter`: see ServerConnection.ask.

        Raises EngineFault if the server breaks off, fails or exceeds `seconds`; EngineError if it
        refuses the request.
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
        """Returns a new HTTP client and WebSocket to this server, for one event loop; each connects
        at its first request.
        """
        limits = httpx.Limits(max_connections=None)
        timeout = httpx.Timeout(None, connect=30.0)
        # trust_env=False: no proxy may see the key
        client = httpx.AsyncClient(
            timeout=timeout, limits=limits, trust_env=False, verify=self.verified
        )
        return Connections(self, client, ServerConnection(self.address, self.headers, tls=self.tls))

    def close(self) -> None:
        """Aborts the server's requests and releases the run's lease; the server keeps running."""
        with suppress(EngineError):
            self.abort_all(PROBE_SECONDS)
            self.release()

    def fault(self, what: str) -> EngineFault:
        return EngineFault(f"The {self.kind} server at {self.address} {what}. {self.log_tail()}")

    def log_tail(self) -> str:
        """Returns a hint for error messages: where the user finds the server's log."""
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
        """Returns the JSON object in `reply`, the server's reply to a request of `path`. Raises
        EngineFault if it is no JSON object.
        """
        try:
            return reply.read()
        except ValueError as error:
            raise self.fault(
                f"answered {path} with what is no object of JSON ({error}): {reply}"
            ) from error

    def _told_of(self, path: str, name: str, kind: type[Told]) -> Told:
        """Sends a GET request to `path` and returns the field `name` of the JSON reply. Raises
        EngineFault if the field is missing, empty or not of the type `kind`.
        """
        found = self.told(path).get(name)
        if type(found) is not kind or not found:
            raise self.fault(f"answered {path} without its {name}")
        return found

    def _late(self, seconds: float) -> EngineFault:
        return self.fault(f"gave no answer in {seconds:g} s (rollout.deadline_seconds)")

    def _refused(self, why: str) -> EngineError:
        return EngineError(f"The {self.kind} server at {self.address} refused a prompt: {why}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
