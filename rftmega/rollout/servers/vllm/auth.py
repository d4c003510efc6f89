"""Authentication middleware of a run's vLLM server: requires the key on every request, and allows
only the paths that the trainer uses.

vLLM's own key protects only some paths, and its development endpoints for weights
(VLLM_SERVER_DEV_MODE) include endpoints that execute arbitrary requests. A server loads this
middleware with `--middleware`, which runs before all of vLLM's own.
"""

import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from rftmega.rollout.servers.vllm import ownership
from rftmega.rollout.servers.vllm.ownership import OWNER, Ownership
from rftmega.rollout.servers.vllm.protocol import SOCKET
from rftmega.runtime.parallel.orphans import PARENT, end_with_all

SAMPLES = "/samples"  # handled here: checksums of vLLM's patches of sample images
ADAPTER = "/adapter"  # handled here: POST, with a payload (`weights.transports.adapter_message`)
IDENTITY = "/identity"  # handled here: an id that changes with each start and owner
DRAFTS = "/drafts"  # handled here: counts of speculative decoding since the last request
KEY = (
    "RFTMEGA_SERVER_KEY"  # in the environment; command lines are visible to every user of the host
)
ADVICE = f'Set it to the same for servers and trainer: export {KEY}="$(openssl rand -hex 32)"'
PATHS = {
    *("/health", "/version", "/get_world_size", "/is_paused"),
    *("/inference/v1/generate", "/abort_requests", "/pause", "/resume"),
    *(
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
    ),
}
FOR_ANYBODY = {
    "/health",
    "/version",
    "/is_paused",
    SAMPLES,
    IDENTITY,
    OWNER,
}  # who has the key, whichever run owns the server
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def headers(key: str, run: str = "") -> dict[str, str]:
    """Returns the HTTP headers that authenticate a request with the key `key` and name the run with
    id `run` ("": no run).

    Raises ValueError if the key is empty or has characters that can't be in a header.
    """
    if not key:
        raise ValueError(f"{KEY} is empty: whoever reaches a server could use it. {ADVICE}")
    odd = [place for place, letter in enumerate(key) if not " " <= letter <= "~"]
    if key != key.strip(" "):
        odd.append(0 if key[0] == " " else len(key) - 1)
    if odd:
        raise ValueError(
            f"{KEY} has {key[odd[0]]!r} as character {odd[0] + 1} of {len(key)}, which can't be in a request: ASCII letters, "
            f"digits and signs can, without blanks or line ends around them. {ADVICE}"
        )
    found = {"Authorization": f"Bearer {key}"}
    return found | {ownership.HEADER: run} if run else found


def given_key() -> str:
    """Returns the authentication key from the environment variable RFTMEGA_SERVER_KEY. Raises
    ValueError if it is missing or invalid.
    """
    if KEY not in os.environ:
        raise ValueError(f"{KEY} is not set. {ADVICE}")
    headers(os.environ[KEY])
    return os.environ[KEY]


class Authentication:
    """Authentication is an ASGI middleware of the server that refuses requests without the key or
    to other than the allowed paths; it handles this package's own paths and passes all others on to
    vLLM.
    """

    def __init__(self, app: App):
        """Wraps `app`, vLLM's ASGI application. Raises ValueError if the environment has no valid
        key, so that the server does not start.
        """
        self.app = app
        if parent := os.environ.get(PARENT):
            end_with_all(int(parent))
        self.start = secrets.token_hex(8)
        self.wanted = headers(given_key())["Authorization"].encode()
        self.ownership = Ownership()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif not any(
            name == b"authorization" and hmac.compare_digest(value, self.wanted)
            for name, value in scope["headers"]
        ):
            await _refuse(401, scope, send)
        elif scope["path"] not in FOR_ANYBODY and not self.ownership.allows(_run_of(scope)):
            await _refuse(ownership.TAKEN, scope, send)
        elif scope["type"] == "websocket" and scope["path"] == SOCKET:
            await _serve(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == SAMPLES:
            await _tell_samples(scope, send)
        elif scope["type"] == "http" and scope["path"] == IDENTITY:
            await _tell({"identity": f"{self.start}-{self.ownership.changes}"}, send)
        elif scope["type"] == "http" and scope["path"] == DRAFTS:
            await _tell_drafts(scope, send)
        elif scope["type"] == "http" and (scope["method"], scope["path"]) == ("POST", OWNER):
            await self._own(receive, send)
        elif scope["type"] == "http" and (scope["method"], scope["path"]) == ("POST", ADAPTER):
            await _take_adapter(scope, receive, send)
        elif scope["type"] == "websocket" or scope["path"] not in PATHS:
            await _refuse(404, scope, send)
        else:
            await self.app(scope, receive, send)

    async def _own(self, receive: Receive, send: Send) -> None:
        """Handles a request with which a run claims, renews or releases this server's lease."""
        try:
            said = json.loads(await _body(receive) or b"null")
        except (ValueError, RecursionError):
            said = None
        status, found = self.ownership.told(said)
        await _tell(found, send, status=status)


def _run_of(scope: Message) -> str:
    told = [value for name, value in scope["headers"] if name == ownership.HEADER.encode()]
    return told[0].decode("latin-1") if told else ""


async def _body(receive: Receive) -> bytes | None:
    """Returns the body of the HTTP request that ASGI's function `receive` reads; None if the client
    disconnected before its end.
    """
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":  # half of a payload
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _tell_samples(scope: Message, send: Send) -> None:
    """Replies with checksums of the patches that vLLM's preprocessing makes of sample media, which
    the trainer compares with its own. The query names the media kinds with their placeholder
    tokens: ?image=TOKEN&video=TOKEN.
    """
    from rftmega.rollout.engines.image_prompts import samples_of_vllm

    try:
        asked = {kind: int(token) for kind, token in parse_qsl(scope["query_string"].decode())}
    except ValueError as error:
        await _tell({"error": str(error)}, send, status=ownership.BAD)
        return
    renderer = scope["app"].state.engine_client.renderer
    await _tell(samples_of_vllm(renderer, asked), send)


async def _take_adapter(scope: Message, receive: Receive, send: Send) -> None:
    """Passes the request's body, serialised LoRA adapters, to all workers of the server. The
    query's `version` is the weight version that the adapters must belong to. Replies with status
    400 if there is no version, 500 if a worker refuses the adapters.
    """
    payload = await _body(receive)
    if payload is None:
        return
    engine = scope["app"].state.engine_client
    try:
        version = int(dict(parse_qsl(scope["query_string"].decode()))["version"])
    except (KeyError, ValueError) as error:
        await _tell({"error": f"no version: {error!r}"}, send, status=ownership.BAD)
        return
    try:
        if engine.vllm_config.lora_config is None:
            raise ValueError(
                "it was started without adapters; start it with the run's model.lora.push=adapters"
            )
        said = await engine.collective_rpc("take_adapter", args=(payload, version))
        if refusals := list(filter(None, said)):
            raise ValueError(refusals[0])
    except Exception as error:
        await _tell({"error": str(error)}, send, status=500)
    else:
        await _tell({"status": "taken"}, send)


async def _tell_drafts(scope: Message, send: Send) -> None:
    """Replies with the counts of `DraftingWorker.draft_counts` for the number of positions in the
    query.
    """
    engine = scope["app"].state.engine_client
    try:
        positions = int(dict(parse_qsl(scope["query_string"].decode()))["positions"])
        counts, *_ = await engine.collective_rpc("draft_counts", args=(positions,))
    except Exception as error:
        await _tell({"error": repr(error)}, send, status=ownership.BAD)
    else:
        await _tell({"counts": counts}, send)


async def _tell(found: Any, send: Send, *, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(found).encode()})


async def _serve(scope: Message, receive: Receive, send: Send) -> None:
    """Serves the completion requests of one WebSocket connection with CompletionsSocket, which
    costs less than vLLM's own endpoints.
    """
    from rftmega.rollout.servers.vllm.completions_socket import CompletionsSocket

    await CompletionsSocket(scope["app"].state.engine_client, receive, send).serve()


async def _refuse(status: int, scope: Message, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})
