"""Detects the sandbox features of this machine."""

import contextlib
import os
import tempfile
from collections.abc import Callable

from rftmega.sandbox import confine


def lacking(namespaces: bool | None) -> dict[str, bool]:
    """Returns the names of three sandbox features with whether this machine lacks them:
    "namespaces", "filter" (of system calls) and "files" (access control by Landlock or a private
    root).

    `namespaces`: whether namespaces are available; None: not known, so they are tested.
    """
    if namespaces is None:
        with tempfile.TemporaryDirectory(prefix="rftmega-probe-") as box:
            namespaces = _try(lambda: _probe_namespaces(box))
    lacks = {"namespaces": not namespaces, "filter": not _try(_probe_filter)}
    lacks["files"] = lacks["namespaces"] and not _try(_probe_landlock)
    return lacks


def _probe_namespaces(box: str) -> None:
    confine.enter_namespaces()
    if os.fork():
        _, status = os.wait()
        os._exit(status >> 8)
    confine.enter_private_root(box)  # a separate folder, as in a run: Python may lie below /tmp


def _probe_filter() -> None:
    if not confine.filter_system_calls(own_pid=None):
        raise OSError


def _probe_landlock() -> None:
    if not confine.restrict_files(tempfile.gettempdir()):
        raise OSError


def _try(step: Callable[[], None]) -> bool:
    """Returns whether the function `step` raises no exception in a child process, which
    then exits.
    """
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            step()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0
