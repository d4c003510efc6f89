"""Shows the progress of a run in the notebook that started it."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rftmega.config import RunConfig
from rftmega.monitoring.history import Step, read_history

LOOK_SECONDS = 0.5


def in_notebook() -> bool:
    """Returns whether this process is a notebook kernel."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive else None
    return type(shell).__name__ == "ZMQInteractiveShell"


@contextmanager
def progress(config: RunConfig) -> Iterator[None]:
    """Shows the step, its metrics and the time left below the notebook's cell, within a `with`
    block, instead of the ranks' progress bars. Has no effect outside a notebook.
    """
    if not in_notebook():
        yield
        return
    from IPython.display import display

    metrics = Path(config.trainer.output) / "metrics.jsonl"
    begin, ended = time.time(), threading.Event()
    shown = display({"text/plain": "starting"}, raw=True, display_id=True)

    def follow() -> None:
        while not ended.wait(LOOK_SECONDS):
            show()

    def show() -> None:
        history = [step for step in read_history(metrics) if (step["time"] or 0) >= begin]
        if history:
            shown.update({"text/plain": line_of(history, config.trainer.steps)}, raw=True)

    before = os.environ.get("TQDM_DISABLE")
    os.environ["TQDM_DISABLE"] = "1"
    thread = threading.Thread(target=follow, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        show()
        if before is None:
            del os.environ["TQDM_DISABLE"]
        else:
            os.environ["TQDM_DISABLE"] = before


def line_of(history: list[Step], steps: int) -> str:
    """Returns a line of text about the last step in `history`: its number, the total number of
    steps (`steps`), the time left, and metrics.
    """
    from rftmega.monitoring.observers.progress import status

    last: Any = history[-1]
    begun: Any = history[0]
    done = last["step"] - begun["step"]
    left = ""
    if done:
        seconds = (last["time"] - begun["time"]) / done * (steps - last["step"])
        left = f", {int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02} left"
    finite = {name: value for name, value in last.items() if value is not None}
    return f"step {last['step']} of {steps}{left}: {status(finite)}".removesuffix(": ")
