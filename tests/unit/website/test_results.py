"""docs/results.md is what its records say, and takes the figures of runs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.sheet import Sheet
from website import results

ROOT = Path(__file__).parents[3]
MEASURED = {"described": "NVIDIA H200, 150 GB", "date": "2026-12-01T10:30+00:00", "commit": "abc"}
RECORD = {
    "what": "step over TRL's",
    "ours": "2.2 s",
    "reference": "at most 1",
    "ratio": "1.2",
    "machine": "CPU",
    "date": "2026-11-22",
    "commit": "7529313",
    "command": 'python -m benchmarks "step against TRL"',
    "note": "",
    "row": "bench: step against TRL",
    "cells": {"ours": "{ours_seconds} s, {rewards: last}", "ratio": "{ours_over_trl}"},
}
LINE = '| step over TRL\'s | 2.2 s | at most 1 | 1.2 | CPU | 2026-11-22 7529313 | `python -m benchmarks "step against TRL"` |'


def wrote(file: Path, machine: dict[str, str], **rows: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machine, "rows": rows}))


def after(source: Path, row: str = "bench: step against TRL") -> dict[str, Any]:
    return results.updated(RECORD | {"row": row}, results.measured(source))


def test_the_page_is_what_the_records_say() -> None:
    text = (ROOT / "docs/results.md").read_text()
    assert text == results.document(ROOT / "docs/results"), "python -m website.results"
    assert len(text.splitlines()) <= 200
    written = {file.stem for file in (ROOT / "docs/results").glob("*.json")}
    assert written == set(results.GROUPS)


def test_a_table_has_a_line_a_record_then_notes_and_what_was_not_measured() -> None:
    records = [RECORD, RECORD | {"note": "alone."}, RECORD | {"what": "x", "ours": "not measured"}]
    title, _, *lines = results.table("CPU speed", records).splitlines()
    assert title == "## CPU speed"
    assert lines[2:] == [LINE, LINE, "", "- step over TRL's: alone.", "- Not measured yet: x."]


@pytest.mark.parametrize(
    ("without", "said"), [({"command": ""}, "command"), ({"ours": "", "ratio": ""}, "figure")]
)
def test_a_record_without_its_command_or_figure_is_refused_by_name(
    without: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=f"step over TRL's.*has no {said}"):
        results.table("CPU speed", [RECORD | without])


def test_new_figures_replace_those_of_the_row(tmp_path: Path) -> None:
    figures = {"ours_seconds": 26480.1, "rewards: last": 1.93e-6, "ours_over_trl": 0.91678}
    wrote(tmp_path / "bench.json", MEASURED, **{"step against TRL": figures})
    new = {"ours": "26.48k s, 1.9e-6", "ratio": "0.9168", "machine": "H200"}
    assert after(tmp_path) == RECORD | new | {"date": "2026-12-01", "commit": "abc"}
    assert after(tmp_path, "bench: another")["ours"] == "2.2 s"
    wrote(tmp_path / "bench.json", MEASURED, **{"step against TRL": {"skipped": "no TRL"}})
    assert after(tmp_path) == RECORD


def test_a_row_may_tell_its_own_commit_and_why_it_failed(tmp_path: Path) -> None:
    found = {"error": "ValueError: a | b " + "word " * 20, "commit": "def"}
    wrote(tmp_path / "gpu/loop.json", MEASURED, Megatron=found, LoRA={"out_of_memory": "8 GiB"})
    failed = after(tmp_path, "gpu/loop: Megatron")
    assert failed["ours"].startswith("failed: ValueError: a / b word") and len(failed["ours"]) <= 48
    assert failed["commit"] == "def"
    assert after(tmp_path, "gpu/loop: LoRA")["ours"] == "out of memory"


def test_a_file_without_a_commit_needs_one(tmp_path: Path) -> None:
    (tmp_path / "mutations.json").write_text("[]")  # has no rows
    sheet = Sheet(tmp_path / "gpu/push.json", {})
    sheet.row("8B", lambda: {"seconds": 1.0})
    content = json.loads(sheet.file.read_text())
    content["machine"]["commit"] = ""  # a machine without the repository
    sheet.file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="push.json does not say its commit"):
        results.measured(tmp_path)
    assert results.measured(tmp_path, "abc")["gpu/push: 8B"]["commit"] == "abc"


def test_the_program_updates_records_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in results.GROUPS:
        file = tmp_path / f"docs/results/{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([RECORD] if name == "cpu_speed" else []))
    figures = {"ours_seconds": 1.5, "rewards: last": "0.25", "ours_over_trl": 0.9}
    wrote(tmp_path / "runs/bench.json", MEASURED, **{"step against TRL": figures})
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["results", "--from", str(tmp_path / "runs")])
    assert results.main() == 0
    (record,) = json.loads((tmp_path / "docs/results/cpu_speed.json").read_text())
    assert (record["ours"], record["ratio"], record["commit"]) == ("1.5 s, 0.25", "0.9", "abc")
    assert "| step over TRL's | 1.5 s, 0.25 |" in (tmp_path / "docs/results.md").read_text()
