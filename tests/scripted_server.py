"""What answers as a vLLM server does, without a model: weights are a count, answers depend on the
seed alone.

`--fault KIND --after N --marker FILE`: once, when N answers were given, it is killed or stopped
(KIND: KILL or STOP); FILE is written then. Every answer is noted in FILE.answers. `--hang PATH`:
requests there are never answered. `--pause SECONDS`: that each answer takes. It answers at /health
whatever else it does.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
from array import array
from pathlib import Path
from typing import Any

import uvicorn

from rftmega.rollout.servers.vllm import ownership, protocol

parser = argparse.ArgumentParser()
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--fault", default="")
parser.add_argument("--after", type=int, default=0)
parser.add_argument("--marker", type=Path)
parser.add_argument("--hang", default="")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--version", default="", help="that it says whatever it is given")
parser.add_argument("--vllm", default="", help="version that it says it is of")
parser.add_argument("--ssl-certfile")
parser.add_argument("--ssl-keyfile")
given, _ = parser.parse_known_args()
turn = asyncio.Lock()  # one thing at a time
owned = ownership.Ownership()
state: dict[str, Any] = {"names": None, "version": "random weights", "answers": 0}


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        return
    key = f"Bearer {os.environ['RFTMEGA_SERVER_KEY']}".encode()
    may_enter = (b"authorization", key) in scope["headers"]
    if scope["type"] == "websocket":
        await (converse(receive, send) if may_enter else send({"type": "websocket.close"}))
        return
    text, more = b"", True
    while more:
        message = await receive()
        text, more = text + message["body"], message.get("more_body", False)
    told: Any = {}
    status = 200 if may_enter else 401
    if may_enter and scope["path"] == ownership.OWNER:
        status, told = owned.told(json.loads(text))
    elif may_enter:
        run = dict(scope["headers"]).get(ownership.HEADER.encode(), b"").decode()
        if scope["method"] == "POST" and not owned.allows(run):
            status = ownership.TAKEN
        else:
            told = await respond(scope["path"].rpartition("/")[2], json.loads(text or "{}"))
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})


async def respond(path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path == "health":
        return {}
    async with turn:
        if path == given.hang:
            await asyncio.Event().wait()
        if path == "init_weight_transfer_engine":
            state["names"] = body["init_info"]
        if path == "finish_weight_update":
            assert state["names"] is not None
            state["version"] = given.version or body["weight_version"]
    identity = f"{os.getpid()}-{owned.changes}"
    return {"status": "done", "version": given.vllm, "world_size": 1, "identity": identity}


async def converse(receive: Any, send: Any) -> None:
    await receive()  # websocket.connect
    await send({"type": "websocket.accept"})
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(ask: protocol.Ask) -> None:
        async with turn:
            await asyncio.sleep(given.pause)
            reply = protocol.packed([completion(ask)])
        await send({"type": "websocket.send", "bytes": reply})

    while (message := await receive())["type"] == "websocket.receive":
        for said in protocol.asked(message["bytes"]):
            if isinstance(said, protocol.Ask):
                running[said.number] = asyncio.create_task(answer(said))
            else:
                running[said.number].cancel()
    for task in running.values():
        task.cancel()


def completion(ask: protocol.Ask) -> protocol.ServerReply:
    if state["answers"] == given.after and given.fault and not given.marker.exists():
        given.marker.touch()
        os.kill(os.getpid(), getattr(signal, f"SIG{given.fault}"))
    state["answers"] += 1
    seed = ask.sampling["seed"]
    if given.marker:
        with given.marker.with_suffix(".answers").open("a") as file:
            file.write(f"{seed}\n")
    ids = [*protocol.numbers("i", ask.token_ids), seed]
    logprobs = array("f", [-0.5] * len(ids)).tobytes()
    spans = [(state["version"], 0, len(ids))]
    return protocol.ServerReply(ask.number, protocol.integers(ids), logprobs, "length", spans)


if __name__ == "__main__":
    server = uvicorn.Server(
        uvicorn.Config(
            application,
            host=given.host,
            port=given.port,
            log_level="error",
            ssl_certfile=given.ssl_certfile,
            ssl_keyfile=given.ssl_keyfile,
        )
    )
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    server.run()
