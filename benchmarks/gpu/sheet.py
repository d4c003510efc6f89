"""Writes the rows of one part to a JSON file after each row, so that an aborted command keeps its
results.
"""

import datetime
import gc
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import commit
from rftmega.runtime import device

Figures = Mapping[str, float | str | bool | None]


class Sheet:
    """Sheet holds the rows of one part: the measured figures, or the reason why there are none."""

    def __init__(self, file: Path, settings: Mapping[str, Any], *, told: str = ""):
        """`settings` are the part's sizes; `told` describes the libraries used besides torch."""
        backend = device.current()
        self.file = file
        self.rows: dict[str, dict[str, Any]] = {}
        self._head = {
            "machine": {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
                "device": backend.type,
                "described": backend.described(),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "commit": commit(),
                "beside": told,
            },
            "settings": dict(settings),
        }

    @property
    def failed(self) -> list[str]:
        """Returns the rows that raised, except for lack of device memory, which is a result."""
        return [name for name, row in self.rows.items() if "error" in row]

    def row(self, name: str, work: Callable[[], Figures]) -> Figures | None:
        """Measures one row. Returns None if it fails; the row then records the error.

        Later rows are measured all the same.
        """
        self._tell(f"{name} ...")
        gc.collect()  # garbage of the previous row
        device.current().release_unused()
        begin = time.monotonic()
        try:
            figures: dict[str, Any] | None = dict(work())
            self.rows[name] = figures or {}
        except torch.OutOfMemoryError as error:
            figures, self.rows[name] = None, {"out_of_memory": _first_line(error)}
        except Exception as error:
            traceback.print_exc()
            figures, self.rows[name] = (
                None,
                {"error": f"{type(error).__name__}: {_first_line(error)}"},
            )
        self.rows[name] = self.rows[name] | {"took_seconds": time.monotonic() - begin}
        self._tell(f"{name}: {json.dumps(self.rows[name])}")
        self._write()
        return figures

    def skip(self, name: str, reason: str) -> None:
        self.rows[name] = {"skipped": reason}
        self._tell(f"{name}: skipped: {reason}")
        self._write()

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self._head | {"rows": self.rows}, indent=1))

    def _tell(self, text: str) -> None:
        sys.stdout.write(f"{self.file.stem}: {text}\n")
        sys.stdout.flush()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
