"""A stand-in for the hub's HTTP API, as far as snapshot_download and upload_folder ask it."""

import base64
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


def mode_of(path: str) -> dict[str, Any]:
    """Returns how a file is to be uploaded."""
    mode = "lfs" if path.endswith(".safetensors") else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}


@contextmanager
def hub(
    repositories: dict[str, Path],
    *,
    token: str = "",
    readers: bool = False,
    received: dict[str, bytes] | None = None,
) -> Iterator[tuple[str, list[str]]]:
    """Serves folders as "models/org/name" and "datasets/org/name"; yields its address and what was
    asked. With a `token` only to who has it; with `readers` nobody may write. What is uploaded goes into
    `received` by "org/name/file".
    """
    asked: list[str] = []
    large: dict[str, bytes] = {}  # by sha256
    uploaded: dict[str, bytes] = {} if received is None else received

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Writes nothing."""

        def do_HEAD(self) -> None:  # noqa: N802  http.server's name
            self._respond(body=False)

        def do_GET(self) -> None:  # noqa: N802
            self._respond(body=True)

        def do_POST(self) -> None:  # noqa: N802
            self._taken()

        def do_PUT(self) -> None:  # noqa: N802
            self._taken()

        def _refused(self) -> bool:
            return bool(token) and self.headers.get("Authorization") != f"Bearer {token}"

        def _content(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

        def _taken(self) -> None:
            content, path = self._content(), unquote(urlsplit(self.path).path)
            asked.append(f"{self.command} {path}")
            if self._refused() and not path.startswith("/large/"):
                return self._send(401, b"{}", {}, body=True)
            return self._send(200, json.dumps(self._reply(path, content)).encode(), {}, body=True)

        def _reply(self, path: str, content: bytes) -> Any:
            if path.startswith("/large/"):
                large[hashlib.sha256(content).hexdigest()] = content
                return {}
            if path == "/api/validate-yaml":
                return {"errors": [], "warnings": []}
            if path == "/api/repos/create":
                said = json.loads(content)
                return {"url": f"{self._host()}/{said['organization']}/{said['name']}"}
            if "/preupload/" in path:
                return {"files": [mode_of(each["path"]) for each in json.loads(content)["files"]]}
            if path.endswith("/objects/batch"):
                objects = json.loads(content)["objects"]
                return {"transfer": "basic", "objects": [self._place_of(each) for each in objects]}
            assert "/commit/" in path, path
            repository = path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in content.splitlines():
                kind, value = json.loads(line).values()
                if kind == "file":
                    uploaded[f"{repository}/{value['path']}"] = base64.b64decode(value["content"])
                elif kind == "lfsFile":
                    uploaded[f"{repository}/{value['path']}"] = large[value["oid"]]
            return {
                "commitUrl": f"{self._host()}/{repository}/commit/{COMMIT}",
                "commitOid": COMMIT,
            }

        def _host(self) -> str:
            return f"http://{self.headers['Host']}"

        def _place_of(self, wanted: dict[str, Any]) -> dict[str, Any]:
            return wanted | {
                "actions": {"upload": {"href": f"{self._host()}/large/{wanted['oid']}"}}
            }

        def _respond(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(f"{self.command} {path}")
            if self._refused():
                return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)
            if path.endswith("/auth-check/write"):
                return self._send(403 if readers else 200, b"{}", {}, body=body)
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
