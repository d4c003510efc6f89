"""File writes that bypass the page cache (O_DIRECT), at the disk's speed: copying into fresh cache
pages would cost more time than the disk.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

BLOCK = 4096  # bytes: the alignment of memory, offset and length that disks require
CHUNK = 16 * 2**20  # bytes of one write
FLYING = 2  # concurrent writes: the disk always has a next one
NOT_HERE = (errno.EOPNOTSUPP, errno.ENODEV, errno.ENOSYS, errno.EINVAL)


class DirectFile:
    """DirectFile is a new file of `size` bytes that is written sequentially. Its data is on the
    disk only after a sync.

    Writes are asynchronous, so an error may belong to bytes of an earlier `write`. If the file
    system does not support direct writes, the file is written through the page cache.
    """

    def __init__(self, path: Path, size: int, *, chunk: int = CHUNK):
        """Creates the file and reserves its disk space at once, so that a full disk fails before
        anything is written. `chunk`: bytes of one write to the disk.

        Raises OSError if the file can't be created or the space is not available.
        """
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._at = self._filled = 0
        self._memory = [np.frombuffer(mmap.mmap(-1, chunk), np.uint8) for _ in range(FLYING + 1)]
        self._flying: list[Future[None]] = []
        try:
            _reserve(self.fd, size)
        except OSError:
            os.close(self.fd)
            raise
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_DIRECT)
        self._pool = ThreadPoolExecutor(FLYING)

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                end = self.tell()
                self._send()
                for each in self._flying:
                    each.result()
                os.ftruncate(self.fd, end)
        finally:
            self._pool.shutdown()
            os.close(self.fd)

    def tell(self) -> int:
        return self._at + self._filled

    def write(self, content: Any) -> int:
        """Copies as many bytes from the beginning of the buffer `content` as fit into the write
        buffer, and returns their number. Raises OSError if writing these or earlier bytes to the
        disk failed.
        """
        memory = self._memory[0]
        count = min(len(content), len(memory) - self._filled)
        np.copyto(
            memory[self._filled : self._filled + count], np.frombuffer(content, np.uint8, count)
        )
        self._filled += count
        if self._filled == len(memory):
            self._send()
        return count

    def _send(self) -> None:
        """Submits the filled buffer for writing, rounded up to whole disk blocks; waits if too many
        writes are pending.
        """
        whole = -(-self._filled // BLOCK) * BLOCK
        self._flying.append(self._pool.submit(self._put, self._memory[0][:whole], self._at))
        self._memory.append(self._memory.pop(0))
        if len(self._flying) > FLYING:
            self._flying.pop(0).result()
        self._at, self._filled = self._at + self._filled, 0

    def _put(self, content: Any, at: int) -> None:
        view, direct = memoryview(content), True
        while len(view):
            try:
                count = os.pwrite(self.fd, view, at)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                direct = False  # the disk needs larger blocks: use the cache
                fcntl.fcntl(
                    self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT
                )
                continue
            view, at = view[count:], at + count


def _reserve(fd: int, size: int) -> None:
    """Reserves `size` bytes of disk space for the open file `fd` if the file system supports it.
    libc's posix_fallocate would otherwise write to every block.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(-(-size // BLOCK) * BLOCK))
    if failed and (found := ctypes.get_errno()) not in NOT_HERE:
        raise OSError(found, os.strerror(found))
