"""Detects a host's NVIDIA hardware, and whether the installed torch can use it."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia/version")  # of the kernel module; exists while it is loaded
NEEDED = {"13": 580, "12": 525}  # CUDA's major version -> the first driver that runs it
INSTALL = "Install the environment for GPUs in one of its own: pip install -r requirements/cuda.txt (docs/cluster.md)."


@dataclass(frozen=True)
class Hardware:
    """Hardware holds the detected driver version, the CUDA version of torch, and whether devices
    are usable.
    """

    driver: str = ""  # its version; empty: no driver
    cuda: str | None = None  # that torch was built with; None: a CPU build
    hidden: bool = False  # CUDA_VISIBLE_DEVICES shows no device: a CPU is wanted
    usable: bool = False  # torch sees a device


def found() -> Hardware:
    """Returns the NVIDIA driver, CUDA version and device availability that this process detects on
    its host.
    """
    driver = re.search(r"(\d+\.[\d.]+)", DRIVER.read_text()) if DRIVER.is_file() else None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Hardware(
        driver=driver[1] if driver else "",
        cuda=torch.version.cuda,
        hidden=visible is not None and visible.strip() in ("", "-1", "NoDevFiles"),
        usable=torch.cuda.is_available(),
    )


def refusals(host: Hardware) -> list[str]:
    """Returns texts, the reasons why a run would not use the GPUs of this host.

    The list is empty if the run uses the GPUs, if the host has none, or if CUDA_VISIBLE_DEVICES
    hides them. `host`: the result of `found`.
    """
    if not host.driver or host.hidden:
        return []
    on_purpose = "To run on the CPU all the same, set CUDA_VISIBLE_DEVICES to nothing."
    if host.cuda is None:
        return [
            f"This host has NVIDIA GPUs (driver {host.driver}), but torch {torch.__version__} is a build for CPUs. "
            f"{INSTALL} {on_purpose}"
        ]
    needed = NEEDED.get(host.cuda.partition(".")[0], 0)
    if int(host.driver.partition(".")[0]) < needed:
        return [
            f"torch {torch.__version__} was built with CUDA {host.cuda}, which needs driver {needed} or newer; this host has "
            f"{host.driver}. Update the driver, or install a torch that was built with an older CUDA. {on_purpose}"
        ]
    if not host.usable:
        return [
            f"This host has driver {host.driver}, and torch a build with CUDA {host.cuda}, but it sees no device: look at "
            f"nvidia-smi, at the container's devices, and at CUDA_VISIBLE_DEVICES. {on_purpose}"
        ]
    return []
