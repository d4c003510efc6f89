"""What a GPU machine without a network is brought: code of its architecture alone, and the packages
that it lacks.
"""

import struct
from pathlib import Path

import pytest

from benchmarks.gpu.carried import CUBIN, MAGIC, entries, pins, reduced

PTX = 1


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 257, 64, len(code)) + bytes(12)
    return header + struct.pack("<I", architecture) + bytes(32) + code


def container(*found: bytes) -> bytes:
    body = b"".join(found)
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body


def library() -> bytes:
    first = container(
        entry(CUBIN, 80, b"ampere!!"), entry(CUBIN, 90, b"hopper!!"), entry(PTX, 90, b"ptx90!!!")
    )
    second = container(entry(CUBIN, 90, b"unused90"), entry(CUBIN, 100, b"blackwel"))
    stray = struct.pack("<I", MAGIC) + b"no container"
    return b"ELF host code" + first + stray + second + b"more host code"


def test_code_of_other_architectures_is_zeros_and_all_else_stays_where_it_is() -> None:
    given = library()
    found = reduced(given, 90, keep=lambda code: code != b"unused90")
    assert len(found) == len(given)
    for gone in (b"ampere!!", b"ptx90!!!", b"unused90", b"blackwel"):
        at = given.index(gone)
        assert found[at : at + len(gone)] == bytes(len(gone))
        found = found[:at] + gone + found[at + len(gone) :]
    assert found == given
    assert [each.architecture for each in entries(given)] == [80, 90, 90, 90, 100]


def test_what_the_machine_has_and_what_no_part_imports_is_not_carried() -> None:
    needed = "# a comment\nPyYAML==6.0.3\nvllm==0.32.0\ntorch===2.13.0\nnvidia-nccl-cu13==2.29.7\ntyping_extensions==4.16.0\n"
    assert pins(needed, "# read today\npyyaml\ntyping-extensions\n") == ["vllm==0.32.0"]


@pytest.mark.parametrize(
    "name", ["websockets", "megatron-core", "vllm", "uvicorn", "apache-tvm-ffi"]
)
def test_packages_that_a_run_imports_late_are_carried(name: str) -> None:
    """A run ended once for want of websockets."""
    folder = Path(__file__).parents[3] / "requirements"
    found = pins((folder / "cuda.txt").read_text(), (folder / "gpu_machine.txt").read_text())
    assert name in [pin.partition("==")[0] for pin in found]
