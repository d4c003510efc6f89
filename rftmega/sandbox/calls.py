"""Tests that call one function of the answer (the program under test), in the checker's process."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

WHOLE = re.compile(r"-?\d{1,18}")
CLOSE = 1e-6  # relative difference of equal floats


def check_calls(told: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    """Calls the answer's function `name`, or that method of a new object of its class Solution,
    with the arguments of each of `calls`, pairs (arguments, expected value).

    `told`: "name", "calls" and "wrapped", whether each expected value is a list of one element,
    which may be meant itself (as APPS writes it); `names`: the answer's objects. Raises an
    exception if a call fails, or some of the values are not as expected.
    """
    expected = [value for _, value in told["calls"]]
    found = []
    for arguments, _ in told["calls"]:
        found.append(function_of(told["name"], names)(*map(with_whole_keys, arguments)))
    if not same(found, expected):
        inner = [value[0] for value in expected] if told["wrapped"] else None
        if inner is None or not same(found, inner):
            raise AssertionError("a value is not as expected")


def function_of(name: str, names: Mapping[str, Any]) -> Any:
    """Returns the answer's function `name`, or that method of a new object of its class Solution.

    Raises KeyError or AttributeError if there is neither.
    """
    if name in names and "Solution" not in names:
        return names[name]
    try:
        return getattr(names["Solution"](), name)
    except AttributeError:
        return names[name]


def with_whole_keys(argument: Any) -> Any:
    """Returns a dictionary with integers as keys if all its keys are whole numbers as text, since
    JSON has no other keys; any other argument unchanged.
    """
    if isinstance(argument, dict) and argument and all(map(WHOLE.fullmatch, argument)):
        return {int(key): value for key, value in argument.items()}
    return argument


def same(found: Any, expected: Any) -> bool:
    """Returns whether a value that the answer returned equals `expected`, a value of JSON: a tuple
    equals a list, keys are compared as text, and floats may differ by rounding errors.

    An object of the answer's own equals nothing.
    """
    if isinstance(expected, list):
        return (
            isinstance(found, Sequence)
            and not isinstance(found, str | bytes)
            and len(found) == len(expected)
            and all(map(same, found, expected))
        )
    if isinstance(expected, dict):
        held = {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}
        return held.keys() == expected.keys() and all(
            same(held[key], expected[key]) for key in expected
        )
    if isinstance(found, float) and isinstance(expected, int | float):
        return found == expected or math.isclose(found, expected, rel_tol=CLOSE)
    plain = found is None or isinstance(found, bool | int | float | str)
    return plain and bool(found == expected)
