"""Describes the machine and the code of a measurement, for the JSON files in runs/."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def here() -> dict[str, Any]:
    """Returns date, processor, packages, load and commit."""
    cores = len(os.sched_getaffinity(0))
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "described": f"CPU, {cores} cores",
        "commit": commit(),
        "cores": cores,
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_before": os.getloadavg()[0],
    }


def commit() -> str:
    """Returns the commit of the working tree, with a plus where it was changed since.

    Empty where there is no repository.
    """
    asked = ["git", "describe", "--always", "--dirty=+", "--abbrev=7", "--exclude=*"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
