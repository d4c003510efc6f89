"""Reads integers from environment variables that a launcher sets."""

import os

from rftmega.core.errors import ConfigError


def whole_number(variable: str, default: int | None = None) -> int:
    """Returns the integer in an environment variable that a launcher sets, or `default` if the
    variable is not set.
    Raises ConfigError if its value is no non-negative integer, or if it is not set and there is no
    default.
    """
    given = os.environ.get(variable, None if default is None else str(default))
    if given is None:
        raise ConfigError(
            f"{variable} is not set. A launcher (torchrun, srun through rftmega launch) sets it."
        )
    if not given.strip().isdecimal():
        raise ConfigError(
            f"{variable}={given!r} must be a whole number: a launcher sets it. Unset it to start one process."
        )
    return int(given)
