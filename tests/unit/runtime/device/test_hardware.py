"""A host whose GPUs a run would not use is refused with what to do; every other one is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rftmega.runtime.device import hardware
from rftmega.runtime.device.hardware import Hardware, refusals

FINE = Hardware("580.65.06", "13.0", usable=True)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (Hardware(), ""),
        (Hardware(cuda="13.0"), ""),  # a login node with the environment of the others
        (FINE, ""),
        (Hardware("535.183.01", "12.4", usable=True), ""),
        (Hardware("580.65.06", None, hidden=True), ""),  # a CPU is wanted
        (Hardware("575.57.08", "13.0"), "needs driver 580 or newer; this host has 575.57.08"),
        (Hardware("515.10", "12.1"), "needs driver 525 or newer"),
        (Hardware("580.65.06", None), "is a build for CPUs. Install the environment for GPUs"),
        (Hardware("580.65.06", "13.0"), "but it sees no device: look at nvidia-smi"),
    ],
)
def test_what_is_refused(host: Hardware, why: str) -> None:
    found = refusals(host)
    assert len(found) == bool(why)
    assert why in "".join(found)


@pytest.mark.parametrize(
    ("visible", "hidden"), [(None, False), ("0,1", False), ("", True), ("-1", True)]
)
def test_what_is_found(
    visible: str | None, hidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "version"
    told.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:19:51 UTC 2025\nGCC version: 13.3\n"
    )
    monkeypatch.setattr(hardware, "DRIVER", told)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = hardware.found()
    assert (found.driver, found.hidden) == ("580.65.06", hidden)
    monkeypatch.setattr(hardware, "DRIVER", tmp_path / "none")
    assert hardware.found().driver == ""


def test_products_of_float32_are_no_tf32_unless_a_user_says_so() -> None:
    """Transformer Engine asks cuBLAS for TF32."""
    told = (
        "import os, importlib, rftmega.runtime.device.before_megatron as module\n"
        "found = os.environ.pop('NVIDIA_TF32_OVERRIDE')\n"
        "importlib.reload(module)\n"
        "print(found, os.environ['NVIDIA_TF32_OVERRIDE'])"
    )
    found = subprocess.run(
        [sys.executable, "-c", told],
        env=os.environ | {"NVIDIA_TF32_OVERRIDE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["1", "0"]
