"""Writes docs/results.md, tables of figures, from the records in docs/results/*.json.

    python -m website.results                # writes the tables
    python -m website.results --from runs    # before that, takes new figures of runs/ into the records

A record is a row of a table. It needs `what`, a figure (`ours` or `ratio`) and the `command` that
measures it; its `note` stands below the table. A program's rows are in runs/FILE.json: `row` is then
"FILE: name of the row", and `cells` has texts of columns with {names} of the program's figures.
"""

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GROUPS = {  # file of records -> title
    "correctness": "Correctness",
    "learning": "Learning",
    "cpu_speed": "CPU speed",
    "gpu_speed": "GPU speed",
    "scale": "Scale (planned)",
    "faults": "Faults",
    "limits": "Known limits",
}
HEAD = """# Results

The newest measurements, by `python -m website.results` from `docs/results/*.json`. [Earlier ones](history.md).
CPU: 2 cores, 24 GiB, Python 3.11, torch 2.13.0, megatron-core 0.16.1, vLLM 0.32.0.
H200: one NVIDIA H200, Python 3.12, torch 2.11.0, CUDA 13.0. Nothing was measured on several GPUs.
A reference is a baseline or a required bound. "~" marks a commit near the measured one.
Learning rows give held-out accuracy before and after training. Recipes ran with seeds 0, 1 and 2.
"""
COLUMNS = (
    "| what | our figure | reference | ratio | machine | commit | command |\n" + "|---" * 7 + "|"
)
UNMEASURED = "not measured"
WIDTH = 160  # characters of a note's line
Record = dict[str, Any]


def document(folder: Path) -> str:
    """Returns the whole page from the records of a folder."""
    groups = {title: folder / f"{name}.json" for name, title in GROUPS.items()}
    return "\n".join(
        [HEAD, *(table(title, json.loads(file.read_text())) for title, file in groups.items())]
    )


def table(title: str, records: list[Record]) -> str:
    """Returns a group's table with its notes, and the names of what was never measured."""
    measured = [record for record in records if record["ours"] != UNMEASURED]
    missing = [record["what"] for record in records if record["ours"] == UNMEASURED]
    notes = [f"- {record['what']}: {record['note']}" for record in measured if record["note"]]
    notes += [f"- Not measured yet: {'; '.join(missing)}."] if missing else []
    below = [line for note in notes for line in textwrap.wrap(note, WIDTH, subsequent_indent="  ")]
    rows = "\n".join([COLUMNS, *map(line_of, measured)])
    return "\n\n".join([f"## {title}", rows, *(["\n".join(below)] if below else [])]) + "\n"


def line_of(record: Record) -> str:
    """Returns a record's line of the table; raises ValueError where it lacks what a row needs."""
    figure = record.get("ours") or record.get("ratio")
    needed = {"what": record.get("what"), "figure": figure, "command": record.get("command")}
    for name, given in needed.items():
        if not given:
            raise ValueError(f"The record {record.get('what')!r} of docs/results has no {name}.")
    figures = [record[name] for name in ("what", "ours", "reference", "ratio", "machine")]
    when, command = f"{record['date']} {record['commit']}".strip(), f"`{record['command']}`"
    return f"| {' | '.join([*figures, when, command])} |"


def measured(source: Path, commit: str = "") -> dict[str, Record]:
    """Reads the rows of source/*.json and source/gpu/*.json: "FILE: row" -> its figures.

    `commit` is that of files that do not say theirs; raises ValueError where it is needed and empty.
    """
    found: dict[str, Record] = {}
    for file in [*source.glob("*.json"), *source.glob("gpu/*.json")]:
        content = json.loads(file.read_text())
        if "rows" not in content:
            continue
        machine, name = content["machine"], file.relative_to(source).with_suffix("").as_posix()
        origin = {
            "machine": machine["described"].partition(",")[0].removeprefix("NVIDIA "),
            "date": machine["date"],
            "commit": machine.get("commit") or commit,
        }
        if not origin["commit"]:
            raise ValueError(f"{file} does not say its commit: name it with --commit.")
        found |= {f"{name}: {row}": origin | figures for row, figures in content["rows"].items()}
    return found


def updated(record: Record, rows: dict[str, Record]) -> Record:
    """Returns a record with the figures of its row, where there is one that was not skipped."""
    figures = rows.get(record.get("row", ""))
    if figures is None or "skipped" in figures:
        return record
    if "error" in figures or "out_of_memory" in figures:
        failed = f"failed: {figures['error']}" if "error" in figures else "out of memory"
        cells = {"ours": textwrap.shorten(failed.replace("|", "/"), 48)}
    else:
        cells = {column: filled(text, figures) for column, text in record["cells"].items()}
    origin = {name: figures[name] for name in ("machine", "commit")}
    return record | cells | origin | {"date": figures["date"].partition("T")[0]}


def filled(text: str, figures: Record) -> str:
    """Returns a text with the figures that its {names} ask for."""
    return re.sub(r"\{([^{}]+)\}", lambda name: shown(figures[name[1]]), text)


def shown(value: float | str) -> str:
    """Returns a figure as it is shown: 26480.1 as 26.48k, 0.0000019 as 1.9e-6."""
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 10_000:
        return f"{value / 1000:.4g}k"
    return (
        f"{value:.4g}" if abs(value) >= 1e-3 or not value else f"{value:.1e}".replace("e-0", "e-")
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="source", type=Path, help="folder of new figures: runs")
    parser.add_argument("--commit", default="", help="of measurements that do not say theirs")
    given = parser.parse_args()
    rows = measured(given.source, given.commit) if given.source else {}
    for file in sorted((ROOT / "docs/results").glob("*.json")):
        records = [updated(record, rows) for record in json.loads(file.read_text())]
        file.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    (ROOT / "docs/results.md").write_text(document(ROOT / "docs/results"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
