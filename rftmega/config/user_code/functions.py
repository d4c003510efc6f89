"""User-defined functions: rewards, from `reward.functions` or passed to `rftmega.train`, and tools.

A reference is FILE.py:FUNCTION or MODULE:FUNCTION; for a reward passed to `rftmega.train` it is
python:FUNCTION.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from rftmega.config.user_code.python_files import module_of
from rftmega.core.errors import ConfigError

RewardFunction = Callable[..., Any]
"""f(prompts, completions, **columns) -> one number per completion, or None if not applicable."""

GIVEN = "python"
REWARDS = "reward.functions"
_given: dict[str, RewardFunction] = {}


def give(functions: Sequence[RewardFunction]) -> list[str]:
    """Registers reward functions in this process, replacing earlier ones, and returns their
    references.

    Raises ConfigError for an object that is not callable, and for two functions of the same name.
    """
    _given.clear()
    for function in functions:
        if not callable(function):
            raise ConfigError(f"rewards: {function!r} is no function.")
        name = _own_name(function)
        if name in _given:
            raise ConfigError(f"rewards: two functions have the name {name}. Rename one.")
        _given[name] = function
    return [f"{GIVEN}:{name}" for name in _given]


def name_of(reference: str) -> str:
    """Returns the function's name in a reference such as FILE.py:FUNCTION; its scores are reported
    and weighted under this name.
    """
    return reference.rpartition(":")[2]


def function_of(reference: str, option: str = REWARDS) -> RewardFunction:
    """Returns the function or class that a reference, FILE.py:FUNCTION or MODULE:FUNCTION, names.

    `option`: name of the option that has the reference, for errors. Raises ConfigError if the
    function does not exist, or its file or module cannot be loaded.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(f"{option}: {reference!r} must be FILE.py:FUNCTION or MODULE:FUNCTION.")
    if place == GIVEN and option == REWARDS:
        if name not in _given:
            raise ConfigError(
                f"{option}: {reference} was given to rftmega.train in Python. Give it again, as rewards=[{name}]."
            )
        return _given[name]
    module = module_of(place, option) if place.endswith(".py") else _imported(place, option)
    function = getattr(module, name, None)
    if not callable(function):
        what = "is no function" if hasattr(module, name) else "is not there"
        raise ConfigError(f"{option}: {name} of {place} {what}.")
    found: RewardFunction = function
    return found


def _imported(name: str, option: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{option}: the module {name} can't be imported: {type(error).__name__}: {error}"
        ) from error


def _own_name(function: RewardFunction) -> str:
    """Returns a function's name, without angle brackets ("lambda" for a lambda).

    For another callable, returns the name of its class or of the wrapped function.
    """
    inner = getattr(function, "func", function)  # of functools.partial
    name: str = getattr(inner, "__name__", type(inner).__name__)
    return name.strip("<>")
