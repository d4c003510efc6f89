"""Writes what runs/gpu/*.json have into the table of docs/results.md: python -m
benchmarks.gpu.table [--source FOLDER] [FILE]

Rows of parts without a file stay as they are in FILE, so that another day's figures are not lost.
"""

import argparse
import itertools
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS

BEGIN, END = (
    "<!-- python -m benchmarks.gpu.table writes this table -->",
    "<!-- end of that table -->",
)
WIDTH, INDENT = 150, "  "  # of the lines below the table
HEAD = ["| part | row | measured |", "|---|---|---|"]


def figures(row: dict[str, Any]) -> str:
    """One cell."""
    if "skipped" in row:
        return f"skipped: {_cell(row['skipped'])}"
    if "error" in row:
        return f"failed: {_cell(row['error'])}"
    if "out_of_memory" in row:
        return "out of the device's memory"
    return ", ".join(
        f"{name} {_value(value)}"
        for name, value in row.items()
        if name != "took_seconds" and value is not None
    )


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return _cell(str(value))


def _cell(text: str) -> str:
    return text.replace("|", "/")


def unmeasured(part: str) -> str:
    return f"not yet measured: `python -m benchmarks.gpu {part}`"


def lines(source: Path, before: list[str]) -> list[str]:
    """The table and, below it, where and when each part was measured.

    `before` is what stood there.
    """
    table, notes = list(HEAD), []
    for name, part in PARTS.items():
        file = source / f"{name}.json"
        if not file.exists():
            old = [line for line in before if line.startswith(f"| {name} |")]
            table += old or [f"| {name} | {row} | {unmeasured(name)} |" for row in part.rows]
            notes += _note_of(name, before)
            continue
        found = json.loads(file.read_text())
        for row in part.rows:
            cell = figures(found["rows"][row]) if row in found["rows"] else unmeasured(name)
            cells = textwrap.wrap(cell, WIDTH - len(f"| {name} | {row} |  |"))
            table += [f"| {name} | {row if cell is cells[0] else ''} | {cell} |" for cell in cells]
        machine = found["machine"]
        beside = f", {machine['beside']}" if machine["beside"] else ""
        sizes = ", ".join(f"{key} {value}" for key, value in found["settings"].items())
        note = f"- `{name}`: {machine['date']}, {machine['described']}, torch {machine['torch']}{beside}"
        notes += textwrap.wrap(
            f"{note}; {sizes}" if sizes else note, WIDTH, subsequent_indent=INDENT
        )
    return [*table, "", *notes] if notes else table


def _note_of(part: str, before: list[str]) -> list[str]:
    """Returns the lines below the table that say where and when the part was measured."""
    starts = [n for n, line in enumerate(before) if line.startswith(f"- `{part}`")]
    if not starts:
        return []
    more = itertools.takewhile(lambda line: line.startswith(INDENT), before[starts[0] + 1 :])
    return [before[starts[0]], *more]


def written(text: str, source: Path) -> str:
    """`text` with its table anew."""
    head, begin, rest = text.partition(f"{BEGIN}\n")
    before, end, tail = rest.partition(f"{END}\n")
    if not begin or not end:
        raise ValueError(
            f"There is no table to write: the text lacks the lines {BEGIN!r} and {END!r}."
        )
    return "".join(
        [head, begin, "\n", "\n".join(lines(source, before.splitlines())), "\n\n", end, tail]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", default=Path("docs/results.md"))
    parser.add_argument(
        "--source", type=Path, default=Path("runs/gpu"), help="folder of the JSON files"
    )
    given = parser.parse_args()
    given.file.write_text(written(given.file.read_text(), given.source))
    return 0


if __name__ == "__main__":
    sys.exit(main())
