"""Data sources that name a library of tasks: "reasoning_gym://chain_sum?min_terms=2&size=5000".

The library creates the tasks in a process of its own, so that it can't change the run's process.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

ADDRESS = re.compile(r"([\w-]+)://(.*)", re.DOTALL)
ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).parents[1] / "requirements"
# libraries that environment.type plays, installed in environment.python -> package
GAMES = {"textarena": "textarena", "openenv": "openenv-core"}
WORKER = "rftmega.sandbox.reasoning_gym_worker"


class TaskSource(NamedTuple):
    """TaskSource is a parsed data source LIBRARY://TASKS: the library's name, and the rest."""

    library: str
    tasks: str


def _reasoning_gym() -> str:
    if importlib.util.find_spec("reasoning_gym") is not None:
        return ""
    return (
        "the package reasoning-gym is not installed. Run\n"
        f"    {sys.executable} -m pip install --no-deps -r {REQUIREMENTS / 'reasoning_gym.txt'}"
    )


# library -> function that returns why its tasks can't be created in this Python, "" if they can
LIBRARIES: dict[str, Callable[[], str]] = {
    "reasoning_gym": _reasoning_gym,
    **dict.fromkeys(GAMES, lambda: ""),
}


def task_source(source: str | Path) -> TaskSource | None:
    """Returns the parsed `source` if it has the form LIBRARY://TASKS, else None."""
    found = ADDRESS.fullmatch(str(source))
    return TaskSource(*found.groups()) if found else None


def refusal(source: TaskSource) -> str:
    """Returns the reason why this library's tasks can't be created; "" if they can."""
    if source.library in LIBRARIES:
        return LIBRARIES[source.library]()
    near = get_close_matches(source.library.lower().replace("-", "_"), LIBRARIES, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{source.library} is no library of tasks.{hint} Known: {', '.join(LIBRARIES)}."


def worker_command(*arguments: str) -> list[str]:
    """Returns the command of the process that uses the library. Its environment is
    `worker_environment`.
    """
    return [sys.executable, "-P", "-m", WORKER, *arguments]


def worker_environment() -> dict[str, str]:
    """Returns environment variables with which the library creates the same tasks in every process:
    some of its data sets depend on the order of a set.
    """
    folders = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }
