"""Images of the web: who may be asked, and that each is fetched once."""

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.data import fetched_files
from rftmega.data.fetched_files import Fetched
from rftmega.data.media.image_processor import processor_of
from rftmega.data.prompts import load_prompts
from rftmega.data.tokenizer import Tokenizer
from tests.tiny_vision import IMAGE, save_tiny_vision
from tests.unit.data.media.test_videos import image

HERE = ["127.0.0.1"]


class Web(ThreadingHTTPServer):
    """Serves images; remembers what was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Completions)
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Completions(BaseHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content, status, headers = image((64, 48)), 200, {}
        if self.path == "/slow.png":
            time.sleep(0.3)
        elif self.path == "/gone.png":
            status = 404
        elif self.path == "/elsewhere.png":
            status, headers = 302, {"Location": "http://localhost/a.png"}
        elif self.path == "/moved.png":
            status, headers = 302, {"Location": "/a.png"}
        elif self.path == "/short.png":
            headers = {"Content-Length": str(len(content) + 9)}
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *said: Any) -> None:
        pass


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_is_fetched_once_whoever_asks(web: Web, tmp_path: Path) -> None:
    processes = [Fetched(tmp_path, HERE) for _ in range(3)]
    address = f"{web.address}/slow.png?size=1"
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda each: each.file(address), processes))
    assert web.asked == ["/slow.png?size=1"]
    assert len({*found}) == 1
    assert found[0].suffix == ".png"
    assert found[0].read_bytes() == image((64, 48))
    assert [each.name for each in (tmp_path / "fetched").iterdir()] == [found[0].name]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("/gone.png", "gone.png can't be fetched: Not Found"),
        ("/elsewhere.png", "http://localhost/a.png is not fetched: its host is not among"),
        ("/short.png", "broke off|can't be fetched"),
        ("file:///etc/hostname", "its host is not among data.media_hosts .127.0.0.1."),
        ("http://127.0.0.1:1/a.png", "can't be fetched: .*refused"),
        ("http://a.org/b.png", "Add it, or download the file"),
        ("http://[/b.png", "is no address"),
    ],
)
def test_what_can_not_be_fetched_is_said(web: Web, tmp_path: Path, address: str, said: str) -> None:
    address = web.address + address if address.startswith("/") else address
    own = Fetched(tmp_path, HERE)
    with pytest.raises(DataError, match=said):
        own.file(address)
    own.ahead([address, address])
    with pytest.raises(DataError, match=said):
        own.file(address)
    assert not [*tmp_path.rglob("*.p*")]


def test_what_leads_to_a_host_that_may_be_asked_is_followed(web: Web, tmp_path: Path) -> None:
    own = Fetched(tmp_path, HERE)
    assert own.file(f"{web.address}/moved.png").read_bytes() == image((64, 48))


def test_a_file_that_is_too_large_is_not_kept(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_files, "MOST_BYTES", 10)
    with pytest.raises(DataError, match="more than 10 bytes"):
        Fetched(tmp_path, HERE).file(f"{web.address}/a.png")


def test_what_a_process_abandoned_another_fetches(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Fetched(tmp_path, HERE)
    target = own.file(f"{web.address}/a.png")
    target.unlink()
    claim = target.with_suffix(".part")
    claim.write_bytes(b"half")
    os.utime(claim, (0, 0))
    rests = iter(range(100))
    monkeypatch.setattr("time.sleep", lambda seconds: next(rests))
    assert own.file(f"{web.address}/a.png").read_bytes() == image((64, 48))
    assert not claim.exists()


def test_records_may_name_addresses_of_these_hosts(web: Web, tmp_path: Path) -> None:
    save_tiny_vision(tmp_path / "model", "qwen2_vl")
    names = ["a.png", "b.png", "gone.png", "a.png"]
    lines = [
        json.dumps({"prompt": "<image>?", "label": "1", "images": [f"{web.address}/{name}"]})
        for name in names
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))

    def load(**how: Any) -> Any:
        return load_prompts(
            tmp_path / "data.jsonl",
            Tokenizer(tmp_path / "model"),
            DataConfig(**how),
            max_prompt_tokens=99,
            processor=processor_of(tmp_path / "model"),
            max_images=1,
        )

    with pytest.raises(DataError, match=r"data.jsonl:1: .*not among data.media_hosts .none."):
        load()
    with pytest.raises(DataError, match=r"data.jsonl:3: .*gone.png can't be fetched"):
        load(media_hosts=HERE)
    lines.pop(2)
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    found = load(media_hosts=HERE)
    assert web.asked.count("/a.png") == web.asked.count("/b.png") == 1
    assert found[0].images == found[2].images
    assert found[0].token_ids.count(IMAGE) == found[0].images[0].tokens
