"""Suggestions for unknown options: a similar name, or the counterpart of another framework's
option.
"""

import difflib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

CLOSE = 0.75  # minimum difflib ratio for every part of a dotted name
TABLES = Path(__file__).with_name("from_other_systems.md")  # the page of the documentation
SYSTEMS = ("TRL", "verl", "LightRFT")  # titles of its tables
PREFIX = "actor_rollout_ref."  # of verl's options; the table mostly omits it
MOST_NAMED = 3  # in an error


class TheirNames(NamedTuple):
    """TheirNames is one row of a table in the documentation: `names` of an option in another
    framework, `system`, and `here`, the text on its counterpart in this project.
    """

    system: str
    names: tuple[str, ...]
    here: str


def unknown(name: str, known: Sequence[str]) -> str:
    """Returns the error message for an unknown option `name`, with suggestions; `known`: the names
    of all options.
    """
    inside = [option for option in known if option.startswith(f"{name}.")]
    if inside:
        return f"{name} is a section, not an option. Give options of it, as {inside[0]}."
    if elsewhere := named_elsewhere(name):
        return _theirs(name, elsewhere)
    if near := closest(name, known):
        return f"{name} is not an option. Did you mean {near}?"
    if elsewhere := named_elsewhere(name, whole=False):
        return _theirs(name, elsewhere)
    without_section = [option for option in known if option.endswith(f".{name}")][:MOST_NAMED]
    if without_section:
        return f"{name} is not an option. Did you mean {' or '.join(without_section)}?"
    return f"{name} is not an option. `rftmega train --help` lists them all."


def _theirs(name: str, elsewhere: Sequence[TheirNames]) -> str:
    said = "; ".join(f"of {row.system}: {row.here}" for row in elsewhere)
    return f"{name} is not an option here. What is in its place ({TABLES.name}) {said}."


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


def named_elsewhere(name: str, *, whole: bool = True) -> list[TheirNames]:
    """Returns at most MOST_NAMED table rows of other frameworks' options with the name `name`. With
    `whole` False, only the last part of the dotted names must be equal.
    """
    name = name.removeprefix(PREFIX)
    leaf = name.rpartition(".")[2]
    if whole:
        return [row for row in rows() if name in row.names][:MOST_NAMED]
    ends = [row for row in rows() if leaf in {own.rpartition(".")[2] for own in row.names}]
    return ends[:MOST_NAMED]


@cache
def rows() -> tuple[TheirNames, ...]:
    """Returns all rows of the tables in the documentation's page from_other_systems.md."""
    found, system = [], ""
    for line in TABLES.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            system = line.removeprefix("## ").strip()
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if system in SYSTEMS and line.startswith("| ") and len(cells) == 2:
            found.append(TheirNames(system, _names(cells[0]), _plain(cells[1])))
    return tuple(found)


def _names(cell: str) -> tuple[str, ...]:
    """Returns the option names in a table cell, without leading dashes and values: max_epochs and
    beta for a cell with `--max_epochs` and `beta=0.1`.
    """
    quoted = re.findall(r"`([^`]+)`", cell)
    bare = (text.lstrip("-").partition("=")[0].partition(" ")[0] for text in quoted)
    return tuple(name.removeprefix(PREFIX) for name in bare)


def _plain(cell: str) -> str:
    """Returns a table cell as text without the markup of links and code."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", cell).replace("`", "")
