"""Checks of the choices and bounds in the fields' annotations, by pydantic, with this project's
error messages.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any

from rftmega.config.plugins import plugin_parts
from rftmega.config.schema import RunConfig
from rftmega.config.secrets import shown
from rftmega.config.tree import (
    AS_THE_POLICY,
    bounded_schema,
    choices_of,
    unions,
    value_of,
    walk,
)

LARGEST = 2**31
# pydantic's error type -> requirement in the message
BOUNDS: dict[str, Callable[[Mapping[str, float]], str]] = {
    "greater_than_equal": lambda bound: f"at least {bound['ge']:g}",
    "greater_than": lambda bound: f"above {bound['gt']:g}" if bound["gt"] else "positive",
    "less_than_equal": lambda bound: f"at most {bound['le']:g}",
    "less_than": lambda bound: f"below {bound['lt']:g}",
}


def numbers(given: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yields dotted name and value of every number in `given`, a config or a part of one, including
    numbers in lists and dictionaries; `name`: the dotted name of `given`, "" for a whole config.
    """
    named: Iterable[tuple[Any, Any]]
    if is_dataclass(given):
        named = [(field.name, getattr(given, field.name)) for field in fields(given)]
    elif isinstance(given, Mapping):
        named = given.items()
    elif isinstance(given, list | tuple):
        named = enumerate(given)
    else:
        if isinstance(given, int | float) and not isinstance(given, bool):
            yield name, given
        return
    for key, value in named:
        yield from numbers(value, f"{name}.{key}" if name else str(key))


def not_finite(config: RunConfig) -> list[str]:
    """Returns a problem for each number that is infinite or NaN.

    The weights of data.sources are checked by `training_data` (data.py) instead.
    """
    found = [(name, value) for name, value in numbers(config) if not math.isfinite(value)]
    return [
        f"{name}={value} must be a finite number."
        for name, value in found
        if not name.startswith("data.sources.")
    ]


def too_large(config: RunConfig) -> list[str]:
    """Returns a problem for each integer that is too large for counts, sizes or seeds of torch,
    NumPy and vLLM.
    """
    return [
        f"{name}={value} must be below 2^31."
        for name, value in numbers(config)
        if isinstance(value, int) and abs(value) >= LARGEST
    ]


def choices_and_ranges(config: RunConfig) -> tuple[list[str], list[str]]:
    """Returns two lists of problems: values that are not among an option's choices, and numbers
    outside their range, including the critic's own options.
    """
    unknown, outside = [], not_finite(config) + too_large(config)
    for error in _refused(config):
        name = _option(error["loc"], config)
        value = value_of(config, name)
        if _is_the_policys(config, name, value):
            continue
        if error["type"] == "literal_error":
            allowed = next(
                choices_of(o.hint) for o in walk(plugins=_plugins(config)) if o.name == name
            )
            unknown.append(f"{name}={value} is unknown. Choose one of: {', '.join(allowed)}.")
        elif error["type"] in BOUNDS and math.isfinite(value):
            outside.append(f"{name}={value} must be {BOUNDS[error['type']](error['ctx'])}.")
        elif error["type"] not in BOUNDS and error["type"] != "finite_number":
            outside.append(f"{shown(name, value, _plugins(config))}: {error['msg']}.")
    return unknown, outside


def _refused(config: RunConfig) -> list[Any]:
    from pydantic import ValidationError

    try:
        _adapter(_plugins(config)).validate_python(asdict(config))
    except ValidationError as error:
        return error.errors(include_url=False, include_context=True)
    return []


@cache
def _adapter(plugins: tuple[type, ...]) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(bounded_schema(plugins))


def _plugins(config: RunConfig) -> tuple[type, ...]:
    return plugin_parts(config.plugins)


def _option(place: Sequence[int | str], config: RunConfig) -> str:
    """Returns the dotted option name of a pydantic error's location. The location contains a
    union's type after the union's name, which the option name does not.
    """
    known, found = unions(_plugins(config)), ""
    for step in place:
        if found not in known or step not in known[found]:
            found = f"{found}.{step}" if found else str(step)
    return found


def _is_the_policys(config: RunConfig, name: str, value: Any) -> bool:
    """Returns whether an option is the critic's and has the same value as the policy's option, for
    which the problem is already reported.
    """
    own = name.removeprefix("critic.")
    return own != name and own.startswith(AS_THE_POLICY) and value == value_of(config, own)
