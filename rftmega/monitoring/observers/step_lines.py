"""Base class of callbacks that write a file with one JSON object per step; a resumed run removes
the lines of the steps that it repeats.
"""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from rftmega.core.types import Metrics
from rftmega.monitoring.observers.observer import Observer
from rftmega.monitoring.observers.output_files import set_aside, synchronise, writing

log = logging.getLogger(__name__)


class StepLines(Observer):
    """StepLines is the base class of callbacks that write a file with one line (JSON object) per
    step. Lines are flushed at once, and synced to the disk at each checkpoint.

    A resumed run keeps the lines up to the step at which it resumes. It moves all other lines,
    invalid ones included, to a second file in the same folder, for example metrics.left_out.jsonl.
    """

    what = "a step"  # content of a line, for a warning

    def __init__(self, path: str | Path, *, warn: bool = False):
        """Stores the settings. `path`: the file; `warn`: whether a line that can't be written is
        skipped with a warning instead of an error, see `writing`.
        """
        self.path, self.warn = Path(path), warn
        self.left_out = self.path.with_name(f"{self.path.stem}.left_out{self.path.suffix}")

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not trainer.resumed:
                set_aside(self.path)
            elif self.path.is_file():
                self._keep_until(trainer.step)
            self.file = self.path.open("ab", buffering=0)

    def _keep_until(self, step: int) -> None:
        """Removes all lines from the file except those of the steps up to `step`.

        Writes the removed lines to `left_out` first, so that no line is lost on a crash.
        """
        kept, later, bad = sorted_out(self.path.read_bytes(), step)
        for number in bad:
            log.warning(
                "%s:%d: is no line of %s, and is left out; it is in %s.",
                self.path,
                number,
                self.what,
                self.left_out.name,
            )
        if later:
            again = f"{len(later)} step(s) after {step} are done again"
            log.info("%s: %s; the lines are in %s.", self.path, again, self.left_out.name)
        if others := [*later, *bad.values()]:
            with self.left_out.open("ab") as file:
                _write_down(file, others)
        draft = self.path.with_name(f".{self.path.name}.draft")
        with draft.open("wb") as file:
            _write_down(file, kept)
        draft.rename(self.path)

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends `line`, the values of one step, to the file as a JSON object. It must have the
        step's number under "step".
        """
        with writing(self.path, warn=self.warn):
            append(self.file.fileno(), f"{json.dumps(line)}\n".encode())

    def on_save(self, trainer: Any) -> None:
        with writing(self.path, warn=self.warn):
            os.fsync(self.file.fileno())
            synchronise(self.path.parent)

    def on_end(self, trainer: Any) -> None:
        self.file.close()

    def on_failed(self, trainer: Any) -> None:
        self.file.close()


def append(descriptor: int, line: bytes) -> None:
    """Appends `line`, with its line break, to an open file. If it can't be written completely,
    removes the part that was written, so that the next line is not joined to it, and raises
    OSError. `descriptor`: the file's descriptor.
    """
    end = os.fstat(descriptor).st_size
    try:
        while line:
            line = line[os.write(descriptor, line) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, end)
        raise


def sorted_out(content: bytes, step: int) -> tuple[list[bytes], list[bytes], dict[int, bytes]]:
    """Sorts the lines of a file of StepLines, whose bytes are `content`, for a run that resumes
    after step `step`. Returns (kept, later, invalid): the lines of steps up to `step`, the lines of
    later steps, and the invalid lines by line number. A killed process leaves an incomplete line, a
    power failure zeros.
    """
    kept, later, bad = [], [], {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line:
            continue
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict) or not isinstance(said.get("step"), int):
            bad[number] = line
        elif said["step"] <= step:
            kept.append(line)
        else:
            later.append(line)
    return kept, later, bad


def _write_down(file: BinaryIO, lines: Iterable[bytes]) -> None:
    file.writelines(line + b"\n" for line in lines)
    file.flush()
    os.fsync(file.fileno())
