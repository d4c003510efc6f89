"""Timelines of all processes over a range of steps, as one file for https://ui.perfetto.dev and
chrome://tracing.

The format: Chrome's trace events
(docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), "complete" ones.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from rftmega.core.types import Metrics
from rftmega.monitoring.observers.observer import Observer
from rftmega.monitoring.observers.output_files import set_aside
from rftmega.runtime.device.spans import Span, clock, recorder
from rftmega.runtime.parallel.clocks import Offset, clock_offsets

PHASES = "phases"  # a separate thread in the trace


class Told(NamedTuple):
    """Told holds the spans (timed stretches of work) that one process has recorded, the process's
    label and the offset of its clock.
    """

    label: str
    spans: Sequence[Span]
    offset: Offset


class Timeline(Observer):
    """Timeline is a callback that records the work of all processes in the steps `first` to `last`
    and then writes it, for example to folder/steps_000003_000005.json. It runs on every process,
    after all other callbacks.
    """

    def __init__(self, folder: str | Path, first: int, last: int, *, label: str):
        """Stores the settings. `folder`: folder of the file; `first` and `last`: the range of
        steps; `label`: description of this process, which the trace shows.
        """
        self.folder, self.first, self.last, self.label = Path(folder), first, last, label

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        if dist.get_rank() == 0 and not trainer.resumed:
            set_aside(self.folder)
        self._follow(trainer.step)

    def on_phase(self, trainer: Any, name: str, seconds: float) -> None:
        end = clock()
        recorder.keep(f"{name} {self.step}", end - int(seconds * 1e9), end, PHASES)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        if trainer.step == self.last:
            self._write(trainer.step)
        self._follow(trainer.step)

    def on_end(self, trainer: Any) -> None:
        self._write(trainer.step)  # for a run that ends within the range

    def on_failed(self, trainer: Any) -> None:
        recorder.stop()

    def _follow(self, done: int) -> None:
        self.step = done + 1
        if self.first <= self.step <= self.last and not recorder.recording:
            self.begun = self.step
            self.offset = clock_offsets()[dist.get_rank()]
            recorder.record()

    def _write(self, done: int) -> None:
        if not recorder.recording:
            return
        told = Told(self.label, recorder.stop(), self.offset)
        everybody: list[Any] | None = (
            [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        )
        dist.gather_object(told, everybody)
        if everybody is not None:
            write(self.folder / f"steps_{self.begun:06d}_{done:06d}.json", everybody)


def write(path: Path, everybody: Sequence[Told]) -> None:
    """Writes the trace of all processes to `path`, one event per line. `everybody`: the recorded
    spans of each process, by rank. The file gets its final name when it is complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in events(everybody)))
        file.write("\n]}\n")
    draft.rename(path)


def events(everybody: Sequence[Told]) -> Iterator[dict[str, Any]]:
    """Yields the events of a trace in Chrome's format. `everybody`: the recorded spans of each
    process, by rank. Processes are numbered by rank, threads by the order of their names; times are
    in microseconds since the first span, by the clock of the first process.
    """
    begin = min(
        (span.begin - told.offset.ahead for told in everybody for span in told.spans), default=0
    )
    for rank, told in enumerate(everybody):
        where = {"ph": "M", "pid": rank}
        about = {"name": told.label, "clock_error_us": told.offset.error / 1000}
        yield {"name": "process_name", "args": about, **where}
        yield {"name": "process_sort_index", "args": {"sort_index": rank}, **where}
        threads = sorted(
            {span.thread for span in told.spans},
            key=lambda name: (name != PHASES, name != "MainThread", name),
        )
        for number, thread in enumerate(threads):
            yield {"name": "thread_name", "args": {"name": thread}, "tid": number, **where}
        for span in told.spans:
            at = {
                "ts": (span.begin - told.offset.ahead - begin) / 1000,
                "dur": (span.end - span.begin) / 1000,
            }
            yield {
                "name": span.name,
                "ph": "X",
                "pid": rank,
                "tid": threads.index(span.thread),
                **at,
            }
