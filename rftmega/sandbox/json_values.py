"""JSON encoding of values exchanged between the checker's and the answer's process; decoding never
runs code.
"""

import importlib
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

LARGEST = 1 << 62  # larger integers are sent as hexadecimal: decimal ones have a digit limit
SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque,
}  # fmt: skip
AS_TEXT = {"decimal": "Decimal", "fractions": "Fraction"}
AS_ISO = ("datetime", "date", "time")  # in this order: a datetime is a date


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Encodes `value` for json.dumps. `other`: called for a value that is not plain (a number,
    text, container, or such a value of datetime, decimal, fractions or NumPy); returns its
    encoding.

    Subclasses of plain types become their plain base class.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -LARGEST < value < LARGEST else ["int", hex(value)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    for name, kind in (
        ("list", list),
        ("tuple", tuple),
        ("set", set),
        ("frozenset", frozenset),
        ("deque", deque),
    ):
        if isinstance(value, kind):
            return [name, [encode(each, other) for each in value]]
    if isinstance(value, dict):
        return [
            "dict",
            [[encode(key, other), encode(each, other)] for key, each in dict.items(value)],
        ]
    if isinstance(value, bytes | bytearray):
        return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, range):
        return ["range", [encode(edge, other) for edge in (value.start, value.stop, value.step)]]
    return _of_library(value, other)


def _of_library(value: Any, other: Callable[[Any], Any]) -> Any:
    """Encodes values of library modules, such as decimal and NumPy, without importing these
    modules. `other`: see `encode`.
    """
    for module, name in AS_TEXT.items():
        if (held := sys.modules.get(module)) and isinstance(value, getattr(held, name)):
            return [name, str(value)]
    if dates := sys.modules.get("datetime"):
        if isinstance(value, dates.timedelta):
            return ["timedelta", [value.days, value.seconds, value.microseconds]]
        for name in AS_ISO:
            if isinstance(value, getattr(dates, name)):
                return [name, value.isoformat()]
    if numpy := sys.modules.get("numpy"):
        if isinstance(value, numpy.generic) and not isinstance(value.item(), numpy.generic):
            return encode(value.item(), other)
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
            return [
                "ndarray",
                [value.dtype.str, list(value.shape), encode(value.ravel().tolist(), other)],
            ]
    return other(value)


def decode(held: Any, other: Callable[[str, Any], Any]) -> Any:
    """Decodes `held`, a value that `encode` returned.

    `other`: called with tag and content of each value that is not plain; returns the value.
    """
    if not isinstance(held, list):
        if held is None or isinstance(held, bool | int | float | str):
            return held
        raise ValueError(f"not a value: {held!r:.100}")
    tag, rest = held
    if tag in SEQUENCES:
        return SEQUENCES[tag]([decode(each, other) for each in rest])
    if tag == "dict":
        return {decode(key, other): decode(each, other) for key, each in rest}
    if tag == "int":
        return int(rest, 16)
    if tag in ("bytes", "bytearray"):
        return (bytes if tag == "bytes" else bytearray).fromhex(rest)
    if tag == "complex":
        return complex(*rest)
    if tag == "range":
        return range(*(decode(edge, other) for edge in rest))
    for module, name in AS_TEXT.items():
        if tag == name:
            return getattr(importlib.import_module(module), name)(rest)
    if tag == "timedelta":
        return importlib.import_module("datetime").timedelta(*rest)
    if tag in AS_ISO:
        return getattr(importlib.import_module("datetime"), tag).fromisoformat(rest)
    if tag == "ndarray":
        kind, shape, numbers = rest
        return (
            importlib.import_module("numpy")
            .array(decode(numbers, other), dtype=kind)
            .reshape(shape)
        )
    return other(tag, rest)
