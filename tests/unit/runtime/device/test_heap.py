"""Freed memory between blocks in use goes back to the system."""

import subprocess
import sys

PROGRAM = """
import ctypes, os, pathlib
from rftmega.runtime.device import heap

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
if not hasattr(libc, "malloc_trim"):
    print("no glibc")
    raise SystemExit
libc.mallopt(-4, 0)  # M_MMAP_MAX: all blocks in the heap
blocks = [libc.malloc(2**20) for _ in range(200)]
for block in blocks:
    ctypes.memset(block, 1, 2**20)
for block in blocks[::2]:
    libc.free(block)
before = resident()
heap.trim()
print((before - resident()) // 2**20)
"""


def test_freed_pages_between_blocks_in_use_are_returned() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    if done.stdout.strip() != "no glibc":
        assert int(done.stdout) > 90
