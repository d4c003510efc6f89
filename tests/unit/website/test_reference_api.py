"""Each name of LightRFT's and RLinf's documented API is in the table, exists here, and accepts the
documented parameters.
"""

import ast
import inspect
import re
from collections import defaultdict
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from website.reference_api import ROWS, SYSTEMS, Row, Status, page

ROOT = Path(__file__).parents[3]
SPECIFIED = {"A": 29, "B": 11, "C": 15, "D": 14, "E": 18}  # last number of each letter
CALLABLE = [row for row in ROWS if row.signature]
TESTED = [row for row in ROWS if row.test]
HERE = [row for row in ROWS if row.where]
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def of(rows: list[Row]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.id)


def resolved(path: str) -> Any:
    """Returns the object at an import path, or None for a field or attribute that only instances
    have. Raises AttributeError if there is none.
    """
    names = path.split(".")
    for number in range(len(names), 0, -1):
        module = ".".join(names[:number])
        try:
            found: Any = import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # a package that the module needs
            continue
        break
    else:
        raise AttributeError(path)
    for name in names[number:]:
        if not hasattr(found, name) and name in attributes_of(found):
            return None
        found = getattr(found, name)
    return found


def attributes_of(found: Any) -> set[str]:
    """Returns the names of attributes that a class declares, or sets in __init__."""
    names = set(getattr(found, "__dataclass_fields__", ())) | set(inspect.get_annotations(found))
    constructor = vars(found).get("__init__")
    if constructor is not None and "__dataclass_fields__" not in vars(found):
        names |= set(re.findall(r"self\.(\w+)\b[^=\n]*=", inspect.getsource(constructor)))
    return names


def parameters_of(signature: str) -> dict[str, str]:
    """Returns the documented parameters in their order: name -> text of the default, "" without one
    and for *names and **names, which keep their stars.
    """
    found = {}
    for part in re.split(r",\s*(?![^(\[{]*[)\]}])", signature):
        name, _, default = part.partition("=")
        found[name.strip()] = default.strip()
    return found


def parameters_here(where: str) -> dict[str, inspect.Parameter]:
    """Returns the parameters of the object at `where` without self; the names of variadic ones have
    their stars.
    """
    found = {}
    for name, each in inspect.signature(resolved(where)).parameters.items():
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        found[stars + name] = each
    found.pop("self", None)  # of a method that was taken from its class
    return found


def equal(default: Any, text: str) -> bool:
    try:
        return bool(default == ast.literal_eval(text))
    except ValueError:  # a name, such as ModelType.encoder_or_decoder
        return str(default) == text


@cache
def functions_in(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def last_name(text: str) -> str:
    return re.findall(r"\w+", text)[-1]


def test_every_row_of_the_specification_is_in_the_table_and_ids_are_unique() -> None:
    ids = [row.id for row in ROWS]
    assert len(ids) == len(set(ids))
    expected = {f"{letter}{n:02}" for letter, last in SPECIFIED.items() for n in range(1, last + 1)}
    assert {each[:3] for each in ids} == expected
    assert all(re.fullmatch(r"[A-E]\d\d[a-z]?", each) for each in ids)


def test_a_status_is_one_of_three_and_a_name_that_is_not_rejected_has_a_place() -> None:
    assert {row.status for row in ROWS} <= set(get_args(Status))
    assert [row.id for row in ROWS if not row.where and row.status != "rejected"] == []
    assert [row.id for row in ROWS if row.status != "implemented" and not row.note] == []


@of(HERE)
def test_a_documented_name_exists_here(row: Row) -> None:
    resolved(row.where)


@of(CALLABLE)
def test_documented_parameters_are_accepted_in_their_order_with_their_defaults(row: Row) -> None:
    own = parameters_here(row.where)
    expected = parameters_of(row.signature)
    assert [name for name in expected if name not in own] == []
    assert [name for name in own if name in expected] == list(expected)
    for name, default in expected.items():
        if default:
            assert equal(own[name].default, default), (name, own[name].default)


def test_parameters_beyond_the_documented_ones_have_defaults() -> None:
    expected = defaultdict(set)
    for row in CALLABLE:
        expected[row.where] |= set(parameters_of(row.signature))
    for where, names in expected.items():
        for name, each in parameters_here(where).items():
            has_default = each.default is not inspect.Parameter.empty or each.kind in VARIADIC
            assert name in names or has_default, (where, name)


@of(TESTED)
def test_the_test_of_a_row_exists_and_its_file_has_the_name(row: Row) -> None:
    file, _, function = row.test.partition("::")
    assert function in functions_in(ROOT / file)
    # rows B are topics: their tests have the name of the object here
    name = last_name(row.where if row.id.startswith("B") else row.name)
    assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), name


def test_a_page_has_every_name_of_its_system_once() -> None:
    pages = {system: page(system) for system in SYSTEMS}
    for row in ROWS:
        text = pages["RLinf" if row.id.startswith("E") else "LightRFT"]
        assert any(row.name in line and row.note in line for line in text.splitlines()), row.id
    lines = [line for text in pages.values() for line in text.splitlines()]
    assert len([line for line in lines if line.startswith("|")]) == len(ROWS) + 2 * len(SPECIFIED)
    assert all(line.count("|") == 5 for line in lines if line.startswith("|"))


def test_a_planted_difference_is_found() -> None:
    name = "rftmega.lightrft.strategy.StrategyBase.all_reduce"
    for signature in ("data, op='sum'", "op='mean', data", "data, op='mean', group=None"):
        with pytest.raises(AssertionError):
            test_documented_parameters_are_accepted_in_their_order_with_their_defaults(
                Row("A05", "all_reduce", "implemented", name, signature)
            )
    with pytest.raises(AttributeError):
        resolved("rftmega.lightrft.strategy.StrategyBase.all_scatter")
