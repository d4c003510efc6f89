"""Generates the option reference that `--help` prints from the source of the config dataclasses."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from rftmega.config.schema import CriticConfig, RunConfig
from rftmega.config.tree import Plugins, default_type, hints, listed, members, options, tabled

MADE = "field(default_factory=lambda: "  # precedes the default of a list
EMPTY = {
    "MISSING": "required",
    "field(default_factory=dict)": "{}",
    "field(default_factory=list)": "[]",
}

INDENT = " " * 6


def option_reference(plugins: Plugins = ()) -> str:
    """Returns the reference of all options as text: for each config field its name, its default and
    the docstring under the field, by section. `plugins`: dataclasses of the user's components.

    A component that has several types, such as the advantage, has one block per type.
    """
    lines: list[str] = []
    for f in fields(RunConfig):
        if is_dataclass(hints(RunConfig)[f.name]):
            lines.append(f"\n{f.name}:")
        lines += _described(RunConfig, f.name, "", plugins)
    return "\n".join(lines)


def top_sections() -> list[str]:
    """Returns the names of the config's sections."""
    return sorted({name.partition(".")[0] for name in options() if "." in name})


def section_reference(name: str, whole: str) -> str:
    """Returns the part of the reference `whole` on the section, the component or the option `name`;
    "" if there is none.
    """
    entry = re.compile(rf" {{2,4}}{re.escape(name)}(?![a-z_0-9])")
    shown, lines = False, []
    for line in whole.splitlines():
        if line and not line.startswith(INDENT):
            shown = bool(entry.match(line))
        if shown and line:
            lines.append(line)
    return "\n".join(lines)


def _described(schema: Any, name: str, prefix: str, plugins: Plugins) -> Iterator[str]:
    """Yields the reference's entries for one config field: its name, default and description.

    `schema`: the dataclass; `name`: its field; `prefix`: dotted name of the dataclass in the
    config.
    """
    hint, dotted = hints(schema)[name], prefix + name
    told = documented(schema).get(name, ("", ""))
    parts, table = members(hint, plugins), tabled(hint, plugins)
    if parts:
        yield f"  {dotted}.type = {default_type(dotted)}\n{_wrapped(told[1])} One of: {', '.join(parts)}."
        for tag, part in parts.items():
            yield f"    {dotted}: {{type: {tag}}}\n{_wrapped(inspect.getdoc(part) or '')}"
            yield from _own(part, f"{dotted}.", plugins)
    elif table is not None:
        yield f"  {dotted}.*\n{_wrapped(told[1])}"
        for tag, part in table.items():
            yield f"    {dotted}: {{{tag}: ...}}\n{_wrapped(inspect.getdoc(part) or '')}"
            yield from _own(part, f"{dotted}.{tag}.", plugins)
    elif is_dataclass(hint) and schema is CriticConfig:  # described once, with the policy's options
        yield f"  {dotted}.*\n{_wrapped(told[1])}"
    elif is_dataclass(hint):
        yield from _own(hint, f"{dotted}.", plugins)
    elif (element := listed(hint)) is not None:
        yield f"  {dotted} = []\n{_wrapped(told[1])}"
        yield from _own(element, f"{dotted}[].", plugins)
    else:
        default = told[0].removeprefix(MADE).removesuffix(")") if MADE in told[0] else told[0]
        yield f"  {dotted} = {EMPTY.get(default, default)}\n{_wrapped(told[1])}"


def _wrapped(text: str) -> str:
    """Returns the paragraphs of a docstring, wrapped and indented."""
    return "\n".join(
        textwrap.fill(" ".join(part.split()), 100, initial_indent=INDENT, subsequent_indent=INDENT)
        for part in inspect.cleandoc(text).split("\n\n")
    )


def _own(schema: Any, prefix: str, plugins: Plugins) -> Iterator[str]:
    """Yields the reference's entries for all fields of the component's dataclass `schema`, except
    its type. `prefix`: dotted name of the component, with a dot at the end.
    """
    for f in fields(schema):
        if f.name != "type":
            yield from _described(schema, f.name, prefix, plugins)


@cache
def documented(schema: type) -> dict[str, tuple[str, str]]:
    """Returns field -> (source text of its default, docstring) for all fields of a dataclass,
    including fields of its base classes.
    """
    found: dict[str, tuple[str, str]] = {}
    for each in reversed(schema.__mro__):
        if not is_dataclass(each):
            continue
        (whole,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(whole, ast.ClassDef)
        for option, doc in pairwise([*whole.body, ast.Pass()]):
            if isinstance(option, ast.AnnAssign) and option.value is not None:
                told = (
                    doc.value.value
                    if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
                    else ""
                )
                found[ast.unparse(option.target)] = (ast.unparse(option.value), str(told))
    return found
