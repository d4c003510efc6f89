"""The CPU as a device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rftmega.runtime.device import CPU

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import re, torch
from rftmega.runtime import device
kept = torch.ones(64 << 20, dtype=torch.uint8)
print(re.search(r"AnonHugePages: +(\\d+)", open("/proc/self/smaps_rollup").read())[1])
"""


@pytest.mark.skipif(
    not HUGE.exists() or "[never]" in HUGE.read_text(), reason="this kernel gives no huge pages"
)
def test_large_tensors_lie_in_huge_pages_when_the_device_was_imported_first() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 32 << 10, "kB of huge pages behind a tensor of 64 MiB"


def test_a_cpu_has_room_and_is_never_waited_for() -> None:
    assert 0 < CPU().room() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with CPU().waits() as places:
        torch.ones(()).item()
    assert places is None
