"""Imports the Python files that an option names."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from rftmega.core.errors import ConfigError


def module_of(path: str, option: str) -> ModuleType:
    """Returns the module of a Python file. The file is loaded once, and again when its modification
    time changes.

    `option`: name of the option that names the file, for errors. Raises ConfigError if the file is
    missing or broken.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError(f"{option}: there is no file {file}.")
    return _module(str(file), file.stat().st_mtime_ns, option)


@cache
def _module(path: str, changed: int, option: str) -> ModuleType:
    """Loads the file. `changed`: the file's modification time, part of the cache key, so that a
    changed file is loaded again.
    """
    name = f"rftmega_plugin_{Path(path).stem}_{abs(hash((path, changed)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{option}: {path} is no Python file. Give one that ends in .py.")
    # dataclasses and inspect look it up in sys.modules
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"{option}: {path} can't be read: {type(error).__name__}: {error}"
        ) from error
    return module
