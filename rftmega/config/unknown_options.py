"""Suggestions for unknown options: a similar name, or the counterpart of another framework's
option.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rftmega.config.tree import sections

CLOSE = 0.75  # minimum difflib ratio for every part of a dotted name
TABLES = Path(__file__).with_name("from_other_systems.md")  # the page of the documentation
SYSTEMS = ("TRL", "verl", "OpenRLHF", "NeMo-RL", "LightRFT")  # titles of its tables
PREFIX = "actor_rollout_ref."  # of verl's options; the table mostly omits it
MOST_NAMED = 3  # in an error
THE_DEFAULT = "the default"  # remark on a value
ITEM = re.compile(r"`([^`]+)`((?:\s*\((?:[^()]|\([^()]*\))*\))*)")


class Named(NamedTuple):
    """Named is an option of another framework in a table: its `name`, the `value` that the row is
    about ("" for all values), its `default` there, "" if it equals ours, and `here`, the text on
    its counterpart.

    `options`: (option, value) of its counterpart, with value "" if the other framework's value is
    kept; empty if the meanings differ, so that a value cannot be translated.
    """

    system: str
    name: str
    value: str
    default: str
    here: str
    options: tuple[tuple[str, str], ...]


def unknown(name: str, known: Sequence[str], value: Any = None) -> str:
    """Returns the error message for an unknown option `name`, with suggestions; `known`: the names
    of all options; `value`: what was given for it, by which the counterpart may differ.
    """
    inside = [option for option in known if option.startswith(f"{name}.")]
    if inside:
        return f"{name} is a section, not an option. Give options of it, as {inside[0]}."
    if elsewhere := named_elsewhere(name, value):
        return _theirs(name, elsewhere)
    if near := closest(name, known):
        return f"{name} is not an option. Did you mean {near}?"
    if elsewhere := named_elsewhere(name, value, whole=False):
        return _theirs(name, elsewhere)
    without_section = [option for option in known if option.endswith(f".{name}")][:MOST_NAMED]
    if without_section:
        return f"{name} is not an option. Did you mean {' or '.join(without_section)}?"
    return f"{name} is not an option. `rftmega train --help` lists them all."


def _theirs(name: str, elsewhere: Iterable[Named]) -> str:
    said: dict[str, list[str]] = {}
    for row in elsewhere:
        about = f" ({row.name}={row.value})" if row.value else ""
        said.setdefault(row.here, []).append(f"of {row.system}{about}")
    told = "; ".join(f"{', '.join(of)}: {here}" for here, of in said.items())
    return f"{name} is not an option here. {TABLES.name} tells users {told}."


def closest(name: str, known: Sequence[str]) -> str:
    """Returns the option of `known` with the most similar name, comparing part by part; "" if none
    is similar.
    """
    parts = name.split(".")
    best, found = 0.0, ""
    for option in known:
        others = option.split(".")
        if len(others) != len(parts):
            continue
        ratios = [_alike(*pair) for pair in zip(parts, others, strict=True)]
        if all(ratios) and sum(ratios) / len(ratios) > best:
            best, found = sum(ratios) / len(ratios), option
    return found


def _alike(a: str, b: str) -> float:
    """Returns the similarity of two parts of dotted names, from 0 to 1; 0 if they differ in more
    than one letter and their similarity is below CLOSE.
    """
    matcher = difflib.SequenceMatcher(None, a, b)
    same = sum(block.size for block in matcher.get_matching_blocks())
    one_off = same and max(len(a), len(b)) - same <= 1
    return matcher.ratio() if one_off or matcher.ratio() >= CLOSE else 0.0


def named_elsewhere(name: str, value: Any = None, *, whole: bool = True) -> list[Named]:
    """Returns at most MOST_NAMED rows of the tables that explain the option `name` of another
    framework.

    If no table has a row for `name`, the result is that of `_around`. If a framework has a row
    about `value`, its other rows are left out. With `whole` False, `name` may lack the section of
    the option: `max_num_seqs` finds the row of `rollout.max_num_seqs`.
    """
    bare = _bare(name)
    if not whole:
        found = [row for row in rows() if row.name.endswith(f".{bare}")]
        return _of_value(found or _unlike_ours(bare), value)
    found = [row for row in rows() if bare in (row.name, row.name.replace(".", "_"))]
    return _of_value(found or _around(bare, () if PREFIX in name else sections()), value)


def _around(name: str, ours: Collection[str]) -> list[Named]:
    """Returns the rows that explain an option for which no table has a row of its own.

    If the option's section is in `ours`, the user has put another framework's option into a section
    of this project. The rows are then those of the option's last part: of TRL's `epsilon` for
    `trainer.epsilon`. Otherwise the rows are those of the innermost enclosing section that has any.

    `ours`: the names of this project's sections.
    """
    around, _, leaf = name.rpartition(".")
    if around in ours:
        return [row for row in rows() if row.name == leaf]
    while around and around not in ours:
        if found := [row for row in rows() if row.name == around]:
            return found
        around = around.rpartition(".")[0]
    return []


def _bare(name: str) -> str:
    """Returns the name of an option without the prefixes of Hydra and of verl."""
    return name.lstrip("+~").removeprefix(PREFIX)


def _unlike_ours(name: str) -> list[Named]:
    """Returns the rows of all options whose last part equals that of `name`, if these rows agree on
    the counterpart. Returns [] if they don't, since the user may mean any of them.
    """
    leaf = name.rpartition(".")[2]
    found = [row for row in rows() if row.name.rpartition(".")[2] == leaf]
    return found if len({row.here for row in found}) == 1 else []


def _of_value(found: Sequence[Named], value: Any) -> list[Named]:
    chosen: list[Named] = []
    for system in SYSTEMS:
        own = [row for row in found if row.system == system]
        about = [row for row in own if row.value and row.value == spelt(value)]
        general = [row for row in own if not row.value]
        chosen += about[:1] or general[:1] or own
    return chosen[:MOST_NAMED]


def row_of(system: str, name: str, value: Any) -> Named | None:
    """Returns the row that explains an option of one framework; None if there is no such row.

    The order of preference is: a row about `value`, a row for all values, a row about another
    value, a row of an enclosing section.
    """
    found = [row for row in rows() if row.system == system and row.name == _bare(name)]
    about = [row for row in found if row.value and row.value == spelt(value)]
    general = [row for row in found if not row.value]
    around = [row for row in _around(_bare(name), ()) if row.system == system]
    return next(iter([*about, *general, *found, *around]), None)


def spelt(value: Any) -> str:
    """Returns a value as the tables write it: True as true, None as null."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


@cache
def rows() -> tuple[Named, ...]:
    """Returns all options in the tables of the documentation's page from_other_systems.md."""
    found: list[Named] = []
    system = ""
    for line in TABLES.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            system = line.removeprefix("## ").strip()
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if system in SYSTEMS and line.startswith("| ") and len(cells) == 2 and "`" in cells[0]:
            found += _read(system, *cells)
    return tuple(found)


def _read(system: str, left: str, right: str) -> list[Named]:
    """Returns the options in one row of a table, given its two cells."""
    theirs, ours = _theirs_in(left), _options_in(right)
    targets: list[tuple[tuple[tuple[str, str], ...], str]]
    if ours and len(ours) == len(theirs):
        targets = [(((name, value),), _written(name, value) + said) for name, value, said in ours]
    elif len(theirs) == 1:
        targets = [(tuple((name, value) for name, value, _ in ours), _plain(right))]
    else:
        targets = [((), _plain(right))] * len(theirs)
    return [
        Named(system, name, value, default, here, options)
        for names, (options, here) in zip(theirs, targets, strict=True)
        for name, value, default in names
    ]


def _theirs_in(cell: str) -> list[list[tuple[str, str, str]]]:
    """Returns the options in a table's left cell. Each option is a list of (name, value, default),
    one for each of its spellings, which a slash separates in the cell.

    A name without a section belongs to the section of the name before it. A lone `=value` belongs
    to the name before it.
    """
    found: list[list[tuple[str, str, str]]] = []
    name, end = "", 0
    for match in ITEM.finditer(cell):
        text, remark = match[1].strip("-"), _plain(match[2]).strip(" ()")
        other = cell[end : match.start()].strip() == "/"
        said, equals, value = (text if "=" in text else text.replace(" ", "=", 1)).partition("=")
        if said:
            alone = other or "." in said or "." not in name
            name = _bare(said) if alone else _beside(name, said)
        end = match.end()
        value = spelt({"True": True, "False": False}.get(value, value)).strip('"')
        default = value if remark == THE_DEFAULT else remark if _is_value(remark) else ""
        row = (name, value if equals else "", default)
        found = [*found[:-1], [*found[-1], row]] if other and found else [*found, [row]]
    return found


def _beside(name: str, leaf: str) -> str:
    return f"{name.rpartition('.')[0]}.{leaf}"


def _is_value(remark: str) -> bool:
    """Returns whether a remark on the left is a default: a number, true or false."""
    return bool(re.fullmatch(r"-?[\d.]+(e-?\d+)?|true|false", remark))


def _options_in(cell: str) -> list[tuple[str, str, str]]:
    """Returns the options in a table's right cell as (name, value, remark), or an empty list if the
    cell says more than options and remarks in brackets.
    """
    if re.sub(ITEM, "", cell).strip(", "):
        return []
    found: list[tuple[str, str, str]] = []
    name = ""
    for match in ITEM.finditer(cell):
        said, _, value = match[1].partition(":")
        if said:
            name = said if "." in said or "." not in name else _beside(name, said)
        found.append((name, value.strip(), _plain(match[2])))
    return found


def _written(name: str, value: str) -> str:
    return f"{name}: {value}" if value else name


def _plain(cell: str) -> str:
    """Returns a table cell as text without the markup of links and code."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", cell).replace("`", "")
