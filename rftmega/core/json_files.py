"""Strict reading of JSON files from other programs; a file that two JSON parsers could read
differently is rejected.
"""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rftmega.core.errors import CheckpointError, RFTMegaError

DEEPEST = 200  # nesting of objects and lists; Python's own limit depends on the caller's stack
# maximum file size; the index of the largest published model has 10 MB
MOST_BYTES = 512 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]', re.DOTALL)
ESCAPES = re.compile(  # pairs of surrogates, single ones (named), every other escape
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)


class NotJSON(ValueError):  # noqa: N818  describes the text
    """Text that is not JSON or not strict JSON; `line`: the line of the error, counted from 1;
    None: unknown.
    """

    def __init__(self, reason: str, line: int | None):
        super().__init__(reason)
        self.line = line


def parse_json(content: str | bytes) -> Any:
    """Parses one JSON value; bytes are UTF-8 and may begin with a byte-order mark.

    Raises NotJSON for invalid JSON, and for input that Python's parser would accept: a key that
    occurs twice in an object, NaN and infinity, a lone surrogate, more than DEEPEST levels.
    """
    text = _decoded(content) if isinstance(content, bytes) else content.removeprefix("\ufeff")
    _refuse_depth(text)
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite
        )
    except json.JSONDecodeError as error:
        raise NotJSON(f"not JSON ({error.msg} at column {error.colno})", error.lineno) from error
    except _Twice as error:
        raise NotJSON(
            f"the key {error.key!r} is there twice in one object", _second_line(text, error.key)
        ) from error
    except ValueError as error:  # a constant, a number that is too large
        raise NotJSON(str(error), None) from error
    for found in ESCAPES.finditer(text):
        if found["lone"]:
            raise NotJSON(
                f"{found['lone']} is half a character (a lone surrogate)",
                _line(text, found.start()),
            )
    return value


def read_json(path: Path, *, raising: type[RFTMegaError] = CheckpointError) -> Any:
    """Reads a file that holds one JSON value.

    Raises an error of class `raising`, naming file and line, if the file cannot be read or parsed.
    """
    try:
        if path.exists() and not path.is_file():
            raise raising(f"{path} is no file.")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise raising(
                f"{path} has {size:,} bytes; a file of JSON of more than {MOST_BYTES:,} is not read."
            )
        content = path.read_bytes()
    except OSError as error:
        raise raising(f"{path} can't be read: {error.strerror or error}.") from error
    try:
        return parse_json(content)
    except NotJSON as error:
        place = path if error.line is None else f"{path}:{error.line}"
        raise raising(f"{place}: {error}.") from error


def read_json_object(
    path: Path, *, raising: type[RFTMegaError] = CheckpointError
) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises an error of class `raising`, naming file and line, if the file cannot be read or holds
    another JSON value.
    """
    value = read_json(path, raising=raising)
    if not isinstance(value, dict):
        raise raising(f"{path} holds {kind_of(value)}, not an object (a mapping in braces).")
    return value


def read_weight_map(
    path: Path, *, ending: str = ".safetensors", raising: type[RFTMegaError] = CheckpointError
) -> dict[str, str]:
    """Reads the index of a Hugging Face model folder: tensor name -> name of the file in that
    folder. `ending`: of those files' names.

    Raises an error of class `raising` if the file is not such an index.
    """
    found = read_json_object(path, raising=raising).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise raising(
            f"{path} is no index of weights: its weight_map is {kind_of(found)}, not tensors and their files."
        )
    for name, file in found.items():
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(ending):
            raise raising(
                f"{path} names {str(file)[:80]!r} for {name[:80]!r}, which is no *{ending} file in its folder."
            )
    return found


def kind_of(value: Any) -> str:
    """Returns JSON's name for the type of a value, with its article; "empty" for an empty dict."""
    if isinstance(value, dict):
        return "an object" if value else "empty"
    names = {
        list: "a list",
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


class _Twice(Exception):
    def __init__(self, key: str):
        super().__init__(key)
        self.key = key


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(number: str) -> float:
    if not math.isfinite(found := float(number)):
        raise ValueError(f"the number {number[:40]} is too large")
    return found


def _decoded(content: bytes) -> str:
    body = content.removeprefix(BYTE_ORDER_MARK)
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise NotJSON(f"not UTF-8 (byte {body[error.start]:#04x})", line) from error


def _refuse_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    depth = 0
    for found in BRACKETS.finditer(text):
        if found[0] in "[{":
            depth += 1
            if depth > DEEPEST:
                raise NotJSON(
                    f"objects and lists are nested more than {DEEPEST} deep",
                    _line(text, found.start()),
                )
        elif found[0] in "]}":
            depth -= 1


def _second_line(text: str, key: str) -> int | None:
    """Returns the number of the line with a key's second occurrence; None if the key is written
    with escapes.
    """
    places = [
        found.start()
        for found in re.finditer(re.escape(json.dumps(key, ensure_ascii=False)) + r"\s*:", text)
    ]
    return _line(text, places[1]) if len(places) > 1 else None


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
