"""Reads numbers that a launcher sets in the environment."""

import os

from rftmega.core.errors import ConfigError


def whole_number(variable: str, default: int | None = None) -> int:
    """Reads a whole number from a variable that a launcher sets.

    Raises ConfigError if it is no whole number, or absent without a default.
    """
    given = os.environ.get(variable, None if default is None else str(default))
    if given is None:
        raise ConfigError(
            f"{variable} is not set. A launcher (torchrun, srun through tools/launch.py) sets it."
        )
    if not given.strip().isdecimal():
        raise ConfigError(
            f"{variable}={given!r} must be a whole number: a launcher sets it. Unset it to start one process."
        )
    return int(given)
