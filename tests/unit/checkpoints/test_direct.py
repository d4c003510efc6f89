"""Files written past the page cache are as given, and what the disk refuses is told."""

import ctypes
import errno
import mmap
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rftmega.checkpoints.o_direct import BLOCK, DirectFile

CHUNK = 4 * BLOCK


def write(stream: DirectFile, content: bytes) -> None:
    view = memoryview(content)
    while len(view):
        view = view[stream.write(view) :]


def parts_of(size: int) -> Iterator[bytes]:
    """Random bytes in pieces of many lengths, also longer than several writes."""
    draw = random.Random(size)
    while size:
        count = min(size, draw.choice([1, 64, 700, BLOCK, 3 * CHUNK + 5]))
        yield draw.randbytes(count)
        size -= count


@pytest.mark.parametrize("chunk", [CHUNK, 1000])  # which no disk takes directly
@pytest.mark.parametrize("size", [0, 1, BLOCK, CHUNK - 1, CHUNK, 7 * CHUNK + 123])
def test_a_file_holds_what_was_written_and_no_more(size: int, chunk: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10 * CHUNK)  # what was there before goes
    given = list(parts_of(size))
    with DirectFile(path, size, chunk=chunk) as stream:
        for number, part in enumerate(given):
            assert stream.tell() == sum(map(len, given[:number]))
            write(stream, part)
    assert path.read_bytes() == b"".join(given)


def cached_pages(path: Path) -> int:
    """Of the file's pages, those in memory (mincore)."""
    size = path.stat().st_size
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), size) as memory:
        there = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        seen = ctypes.c_char.from_buffer(memory)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(seen), ctypes.c_size_t(size), there)
        del seen
        assert not failed
        return sum(page & 1 for page in there)


def test_it_leaves_nothing_in_the_page_cache(tmp_path: Path) -> None:
    content = b"x" * 100 * BLOCK
    plain, path = tmp_path / "plain", tmp_path / "file"
    plain.write_bytes(content)
    assert cached_pages(plain) == 100
    with plain.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(plain):
        pytest.skip(f"{tmp_path} is no disk: its files are its page cache")
    with DirectFile(path, len(content), chunk=CHUNK) as stream:
        write(stream, content)
    assert cached_pages(path) == 0


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_room_that_is_not_there_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with no_file_beyond(3 * CHUNK), pytest.raises(OSError) as raised:
        DirectFile(tmp_path / "file", 4 * CHUNK)
    assert raised.value.errno == errno.EFBIG
    assert (tmp_path / "file").stat().st_blocks == 0


def write_chunks(path: Path, chunks: int, taken: list[int]) -> None:
    with DirectFile(path, CHUNK, chunk=CHUNK) as stream:
        for number in range(chunks):
            write(stream, b"x" * CHUNK)
            taken.append(number)


@pytest.mark.parametrize("chunks", [2, 9], ids=["at the end", "while more is written"])
def test_what_the_disk_refuses_on_the_way_is_told(chunks: int, tmp_path: Path) -> None:
    taken: list[int] = []
    with no_file_beyond(CHUNK), pytest.raises(OSError) as raised:
        write_chunks(tmp_path / "file", chunks, taken)
    assert raised.value.errno == errno.EFBIG
    assert len(taken) == min(chunks, 3)  # the second fails, two travel at a time


def test_after_an_error_of_the_writers_own_nothing_is_left_open(tmp_path: Path) -> None:
    stream = DirectFile(tmp_path / "file", CHUNK, chunk=CHUNK)
    with pytest.raises(ValueError, match="mine"), stream:
        raise ValueError("mine")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(stream.fd)
