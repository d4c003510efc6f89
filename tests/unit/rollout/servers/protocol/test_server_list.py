"""A server list that people and programs edit while it is read."""

import errno
from pathlib import Path
from typing import Any

import pytest

from rftmega.config.addresses import address_of
from rftmega.rollout.servers.protocol.server_list import read_server_list

ONE = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("content", "addresses", "wrong"),
    [
        (b"http://127.0.0.1:1\nhttp://[::1", [ONE], 1),
        (b"hello\n", [], 1),
        (b"http://h:99999999\n", [], 1),
        (b"http://127.0.0.1:abc\nhttp://127.0.0.1:1\n", [ONE], 1),
        (b":abc\n", [], 1),
        (b"http://127.0.0.1\n", [], 1),
        (b"http://127.0.0.1:\n", [], 1),
        (b"http://a\0b:1\nhttp://127.0.0.1: 80\n", [], 2),
        (b"http://user:word@127.0.0.1:1\n", [], 1),
        (b"ftp://127.0.0.1:1\nhttp://127.0.0.1:1/path\nhttp://127.0.0.1:1?a=b\n", [], 3),
        (b"\xff\xfehttp://x:1\nhttp://127.0.0.1:1\n", [ONE], 1),
        (b"\xef\xbb\xbfhttp://127.0.0.1:1\n", [ONE], 0),
        (b"http://127.0.0.1:1 # mine\n  # indented\n\n#\n", [ONE], 0),
        (b"http://127.0.0.1:1\r\nHTTP://127.0.0.1:1/\r\n", [ONE], 0),
        (b"http://[::1]:8100/\nhttp://[::1]:8100\n", ["http://[::1]:8100"], 0),
        (b"https://Host:8100/\n", ["https://host:8100"], 0),
        (b"", [], 0),
    ],
)
def test_what_is_no_address_is_left_out_and_said(
    content: bytes, addresses: list[str], wrong: int, tmp_path: Path
) -> None:
    file = tmp_path / "server_list"
    file.write_bytes(content)
    look = read_server_list(file)
    assert list(look.addresses) == addresses and len(look.problems) == wrong
    assert all(f"{file}:" in problem for problem in look.problems)
    assert all("user" not in problem.partition(" is left")[0] for problem in look.problems)


def test_a_password_in_an_address_is_not_taken() -> None:
    with pytest.raises(ValueError, match="user or password"):
        address_of("http://user:word@10.0.0.2:8100")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_server_list_that_can_not_be_read_is_said(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Path) -> Any:
        raise OSError(number, "of the file server")

    monkeypatch.setattr(Path, "read_bytes", broken)
    look = read_server_list(tmp_path / "server_list")
    assert look.addresses == () and "of the file server" in look.problems[0]


def test_a_folder_is_no_server_list_and_none_is_empty(tmp_path: Path) -> None:
    assert "can't be read" in read_server_list(tmp_path).problems[0]
    assert read_server_list(tmp_path / "none") == ((), ())
