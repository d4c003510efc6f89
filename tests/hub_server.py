"""A stand-in for the hub's HTTP API, as far as snapshot_download asks it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(repositories: dict[str, Path], *, token: str = "") -> Iterator[tuple[str, list[str]]]:
    """Serves folders as "models/org/name" and "datasets/org/name"; yields its address and what was
    asked. With a `token` only to who has it.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Writes nothing."""

        def do_HEAD(self) -> None:  # noqa: N802  http.server's name
            self._answer(body=False)

        def do_GET(self) -> None:  # noqa: N802
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(f"{self.command} {path}")
            if token and self.headers.get("Authorization") != f"Bearer {token}":
                return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)
            for name, folder in repositories.items():
                if path.startswith(f"/api/{name}/"):
                    return self._described(name, folder, path, body)
                own = name.removeprefix("models/")
                if path.startswith(f"/{own}/resolve/"):
                    file = folder / path.split("/resolve/")[1].partition("/")[2]
                    return self._file(file, body)
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)

        def _described(self, name: str, folder: Path, path: str, body: bool) -> None:
            _, _, revision = path.partition("/revision/")
            if revision not in ("", "main", COMMIT):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body=body)
            files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
            if "/tree/" in path:
                sizes = {file: (folder / file).stat().st_size for file in files}
                found: Any = [
                    {"type": "file", "path": file, "size": size, "oid": "0" * 40}
                    for file, size in sizes.items()
                ]
            else:
                said = {"id": name.partition("/")[2], "sha": COMMIT, "private": False}
                found = said | {"siblings": [{"rfilename": file} for file in files]}
            return self._send(200, json.dumps(found).encode(), {}, body=body)

        def _file(self, file: Path, body: bool) -> None:
            if not file.is_file():
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body=body)
            content = file.read_bytes()
            tag = hashlib.sha256(content).hexdigest()
            more = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            return self._send(200, content, more, body=body)

        def _send(self, code: int, content: bytes, more: dict[str, str], *, body: bool) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(content)), **more}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
