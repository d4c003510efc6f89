"""Labels of the code reward: tests in JSON, in the forms in which data sets publish them."""

import ast
import json
from collections.abc import Sequence
from typing import Any

FORMS = (
    'the label is neither {"tests": text} nor {"inputs": [text, ...], "outputs": [as many]} nor '
    '{"fn_name": name, "inputs": [[argument, ...], ...], "outputs": [as many]} nor [{"input": ..., "output": ...}, ...]'
)
STDIN, FUNCTION = ("stdin", "stdin_stdout"), ("functional", "function_call")


def read_tests(label: str) -> dict[str, Any]:
    """Parses a label, which is JSON, and returns one of {"tests": source of asserts}, {"inputs":
    texts, "outputs": texts} of a program, and {"calls": {"name", "calls", "wrapped"}} of a function
    (see `sandbox.calls`).

    Raises ValueError with the reason if the label has no form that docs/rewards.md lists.
    """
    held = _parsed(label)
    if isinstance(held, dict) and isinstance(held.get("test_cases"), list):
        held = held["test_cases"]
    if isinstance(held, list):
        held = _columns(held)
    if not isinstance(held, dict):
        raise _malformed(f"it is {json.dumps(held):.50}")
    if isinstance(held.get("tests"), str):
        return {"tests": _source(held["tests"])}
    return _paired(held)


def complaint(label: str) -> str | None:
    """Returns the reason why `label`, the tests of a prompt as JSON, is invalid; None if it is
    valid.
    """
    try:
        read_tests(label)
    except ValueError as error:
        return str(error)
    return None


def _parsed(label: str) -> Any:
    """Parses JSON; also JSON in a JSON string, as some data sets hold it."""
    try:
        held = json.loads(label)
        return json.loads(held) if isinstance(held, str) else held
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the label is not JSON ({error})") from None


def _source(tests: str) -> str:
    try:
        ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the label's tests are not Python ({error})") from None
    return tests


def _malformed(why: str) -> ValueError:
    return ValueError(f"{FORMS}: {why}")


def _columns(records: Sequence[Any]) -> dict[str, Any]:
    """Returns the inputs, outputs and function name of tests that are one record each."""
    names = set()
    for at, record in enumerate(records):
        if not isinstance(record, dict) or not {"input", "output"} <= record.keys():
            raise _malformed(f"test {at} lacks input or output")
        names.add(_function(record, at))
    if len(names) > 1:
        raise _malformed(f"its tests are of different functions or kinds ({_listed(names)})")
    return {
        "inputs": [record["input"] for record in records],
        "outputs": [record["output"] for record in records],
        "fn_name": next(iter(names), None),
    }


def _listed(names: set[str | None]) -> str:
    return ", ".join(sorted(name or "standard input" for name in names))


def _function(record: dict[str, Any], at: int) -> str | None:
    """Returns the name of the function that a test calls; None if it runs a program. `at`: the
    test's index.
    """
    kind = record.get("testtype") or record.get("type")
    if kind not in (None, *STDIN, *FUNCTION):
        raise _malformed(f"test {at} has the unknown testtype {kind!r:.50}")
    known = record.get("metadata") or {}
    known = _parsed(known) if isinstance(known, str) else known
    name = record.get("fn_name") or (known.get("func_name") if isinstance(known, dict) else None)
    if kind in FUNCTION and not name:
        raise _malformed(
            f"test {at} is {kind}, but names no function (fn_name or metadata.func_name)"
        )
    return None if kind in STDIN or not name else str(name)


def _paired(held: dict[str, Any]) -> dict[str, Any]:
    inputs, outputs = held.get("inputs"), held.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise _malformed(f"it has the keys {', '.join(map(repr, held)) or 'of an empty object'}")
    if not len(inputs) == len(outputs) > 0:
        raise _malformed(f"it has {len(inputs)} input(s) and {len(outputs)} output(s)")
    name = held.get("fn_name") or held.get("func_name")
    if name is None:
        return {
            "inputs": [_text(each, f"input {at}") for at, each in enumerate(inputs)],
            "outputs": [_text(each, f"output {at}") for at, each in enumerate(outputs)],
        }
    if not isinstance(name, str) or not name.isidentifier():
        raise _malformed(f"fn_name={name!r:.50} is no name of a function")
    calls = [_call(*pair, at) for at, pair in enumerate(zip(inputs, outputs, strict=True))]
    lists = all(isinstance(given, list) for given in inputs)
    wrapped = lists and all(isinstance(each, list) and len(each) == 1 for each in outputs)
    return {"calls": {"name": name, "calls": calls, "wrapped": wrapped}}


def _text(held: Any, what: str) -> str:
    """Returns the standard input or the output of a program, given as text or as its lines."""
    if isinstance(held, list) and all(isinstance(line, str) for line in held):
        return "\n".join(held)
    if not isinstance(held, str):
        raise _malformed(f"{what} is {json.dumps(held):.50}, not text; arguments need fn_name")
    return held


def _call(given: Any, expected: Any, at: int) -> list[Any]:
    """Returns [arguments, expected value] of a call. Arguments are a list, or text with one JSON
    value per line; then the expected value is JSON, too.
    """
    if isinstance(given, str):
        values = [_value(line, f"input {at}") for line in given.splitlines() if line.strip()]
        known = _value(expected, f"output {at}") if isinstance(expected, str) else expected
    elif isinstance(given, list):
        values, known = given, expected
    else:
        raise _malformed(f"input {at} is {json.dumps(given):.50}, not a list of arguments")
    return [values, known]


def _value(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _malformed(f"{what} is to be JSON, one value per line, not {text!r:.50}") from None
