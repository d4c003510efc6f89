"""Removal of the working folder of an answer (the program under test) after the answer
has ended.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Callable
from typing import Any


def remove(box: str) -> None:
    """Removes the folder `box` regardless of the file permissions that the answer has set in it."""

    def open_up(function: Callable[[str], Any], path: str, error: Any) -> None:
        for each in (os.path.dirname(path), path):
            with contextlib.suppress(OSError):
                if not stat.S_ISLNK(os.lstat(each).st_mode):
                    os.chmod(each, 0o700)
        with contextlib.suppress(OSError):
            function(path) if function in (os.unlink, os.rmdir) else shutil.rmtree(
                path, onerror=open_up
            )

    if os.path.isdir(box):
        shutil.rmtree(box, onerror=open_up)
