"""What answers as a vLLM server does, without a model: weights are a count, answers depend on the
seed alone.

`--fault KIND --after N --marker FILE`: once, when N answers were given, it is killed or stopped
(KIND: KILL or STOP); FILE is written then. Every answer is noted in FILE.answers. `--hang PATH`:
requests there are never answered. `--pause SECONDS`: that each answer takes.
"""

import argparse
import json
import os
import signal
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--fault", default="")
parser.add_argument("--after", type=int, default=0)
parser.add_argument("--marker", type=Path)
parser.add_argument("--hang", default="")
parser.add_argument("--pause", type=float, default=0.0)
given, _ = parser.parse_known_args()
turn = Lock()
state: dict[str, Any] = {"names": None, "version": "random weights", "answers": 0}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply({} if self.may_enter() else None)

    def may_enter(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {os.environ['RFTMEGA_SERVER_KEY']}"

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(text) if text else {}
        if not self.may_enter():
            self.reply(None)
            return
        with turn:
            self.reply(self.respond(self.path.rpartition("/")[2], body))

    def respond(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == given.hang:
            Event().wait()
        if path == "init_weight_transfer_engine":
            state["names"] = body["init_info"]["names"]
        if path == "finish_weight_update":
            assert state["names"] is not None
            state["version"] = body["weight_version"]
        return self.answer(body) if path == "generate" else {}

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        if state["answers"] == given.after and given.fault and not given.marker.exists():
            given.marker.touch()
            os.kill(os.getpid(), getattr(signal, f"SIG{given.fault}"))
        state["answers"] += 1
        time.sleep(given.pause)
        seed = body["sampling_params"]["seed"]
        if given.marker:
            with given.marker.with_suffix(".answers").open("a") as file:
                file.write(f"{seed}\n")
        return {"choices": [{
            "token_ids": [*body["token_ids"], seed],
            "finish_reason": "length",
            "logprobs": {"content": [{"logprob": -0.5}] * (len(body["token_ids"]) + 1)},
            "weight_versions": [{"version": state["version"]}],
        }]}  # fmt: skip

    def reply(self, body: dict[str, Any] | None) -> None:
        """None: without the run's key."""
        data = json.dumps(body).encode()
        self.send_response(401 if body is None else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


if __name__ == "__main__":
    ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()
