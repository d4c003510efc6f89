"""Makes Python's folders importable for tested code, through descriptors if the code's user has no
access to them, and tests whether the usual modules can be imported.
"""

import importlib
import importlib.util
import json
import os
import stat
import sys
from collections.abc import Callable
from typing import Any

# Modules that answers import, whose absence would silently score 0. All of them come with
# Python except numpy.
MODULES = (
    "abc", "array", "base64", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "decimal", "difflib", "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "io", "itertools",
    "json", "math", "numbers", "operator", "pprint", "queue", "random", "re", "statistics", "string", "struct", "textwrap",
    "time", "typing", "unicodedata", "unittest", "uuid", "zlib", "numpy",
)  # fmt: skip
MEMORY = 1 << 30  # bytes for the test, which checks access, not memory
SECONDS = 60.0
LIMIT = 1 << 16  # bytes of the test's output
TEST = """
import importlib, json
failed = {}
for name in json.loads(input()):
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"[:300]
print(json.dumps(failed))
"""


def open_folders(folders: list[str]) -> dict[str, int]:
    """Returns folder -> descriptor for those of `folders` that lie within a folder that is not
    accessible to every user.

    The caller needs the privileges to open them.
    """
    return {
        folder: os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        for folder in dict.fromkeys(map(os.path.realpath, folders))
        if os.path.isdir(folder) and closed_to_others(os.path.dirname(folder))
    }


def closed_to_others(path: str, below: str = "/") -> str | None:
    """Returns the topmost path that not every user may enter (a file: read), among `path` and the
    folders between it and `below`; None if there is none.
    """
    way = [os.path.realpath(path)]
    while way[-1] not in ("/", os.path.realpath(below)):
        way.append(os.path.dirname(way[-1]))
    for each in reversed(way):
        mode = os.stat(each).st_mode
        needed = stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
        if not mode & needed:
            return each
    return None


def through(opened: dict[str, int]) -> Callable[[str], str]:
    """Returns a function that maps a path within a folder of `opened` (folder -> descriptor) to the
    same file through the descriptor, and any other path to itself.
    """

    def way(path: str) -> str:
        real = os.path.realpath(path)
        for folder, descriptor in opened.items():
            if real == folder or real.startswith(folder + "/"):
                return f"/proc/self/fd/{descriptor}{real[len(folder) :]}"
        return path

    return way


def import_through(opened: dict[str, int]) -> None:
    """Makes this process import modules through the descriptors of `opened` (folder -> descriptor).

    Call it before privileges are dropped: afterwards paths cannot be resolved.
    """
    if not opened:
        return
    way = through(opened)
    sys.path[:] = map(way, sys.path)
    for module in list(sys.modules.values()):
        if isinstance(folders := getattr(module, "__path__", None), list):
            folders[:] = map(way, folders)
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()


def test_job(job: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of `job` (see __main__.py) whose answer is a program that tests which of the
    installed modules in MODULES an answer cannot import.
    """
    found = [name for name in MODULES if importlib.util.find_spec(name)]
    told = {
        "answer": TEST,
        "inputs": [json.dumps(found)],
        "limits": [LIMIT],
        "memory": MEMORY,
        "seconds": SECONDS,
    }
    return job | told


def why_not(outputs: list[str]) -> str | None:
    """Returns the reason why modules cannot be imported, from the `outputs` of the programs of
    `test_job`; None if all could be imported.
    """
    if len(outputs) != 1:
        return "not even a program that only imports modules comes to its end in the sandbox"
    failed: dict[str, str] = json.loads(outputs[0])
    if not failed:
        return None
    closed = {
        name: barrier
        for name in failed
        if (barrier := closed_to_others(origin(name), python_of(origin(name))))
    }
    first = next(iter(closed or failed))
    barrier = closed.get(first) or closed_to_others(origin(first))
    where = f"{first} is {origin(first)}"
    if barrier:
        mode = stat.S_IMODE(os.stat(barrier).st_mode)
        where += (
            f", and {barrier} (mode {mode:04o}) is closed to the user that tested code runs as. Install Python and its "
            f"packages where every user may read them (or chmod o+rX {barrier})"
        )
    else:
        where += f". Install it in Python's own folder, {sys.prefix}"
    return (
        f"tested code can't import {', '.join(failed)}, so right answers would score 0. {first}: {failed[first]}. {where}, or "
        "give the process user namespaces"
    )


def origin(name: str) -> str:
    """Returns the path of the file of the module `name`; Python's folder if the module
    has no file.
    """
    spec = importlib.util.find_spec(name)
    return spec.origin if spec and spec.origin and os.path.exists(spec.origin) else sys.base_prefix


def python_of(path: str) -> str:
    """Returns the folder of Python that contains `path` and that a descriptor or mount makes
    accessible.

    Returns "/" if no such folder contains it.
    """
    real = os.path.realpath(path)
    inside = [
        folder
        for folder in (sys.prefix, sys.base_prefix)
        if real.startswith(f"{os.path.realpath(folder)}/")
    ]
    return inside[0] if inside else "/"
