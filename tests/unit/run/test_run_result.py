"""What a run left behind, as numbers, a table and curves."""

import json
from pathlib import Path
from typing import Any

import pytest

from rftmega.monitoring.history import Change, changes
from rftmega.run.run_result import RunResult

STEPS: list[dict[str, Any]] = [
    {"step": 0, "time": 1.0, "eval_exact_match": 0.25, "eval_seconds": 3.0},
    {"step": 1, "time": 2.0, "reward": 0.125, "push_bytes": 5.0, "loss": None},
    {"step": 2, "time": 3.0, "reward": 0.5, "eval_exact_match": 0.75, "loss": 0.5},
]


@pytest.fixture
def result(tmp_path: Path) -> RunResult:
    lines = [json.dumps(step) + "\n" for step in STEPS]
    half = '{"step": 3, "ti'  # which is being written
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + half)
    return RunResult(STEPS[-1], tmp_path, stopped=False, exit_code=0)


def test_the_history_has_every_whole_line(result: RunResult) -> None:
    assert result.history == STEPS
    assert RunResult({}, Path("nowhere"), stopped=True, exit_code=75).history == []


def test_a_metric_changes_from_its_first_to_its_last_value(result: RunResult) -> None:
    found = changes(result.history)
    assert found == {
        "eval_exact_match": Change(0, 0.25, 2, 0.75),
        "reward": Change(1, 0.125, 2, 0.5),
        "loss": Change(2, 0.5, 2, 0.5),
    }


def test_the_table_has_a_row_a_step(result: RunResult) -> None:
    table = result.table("reward", "push_bytes")
    assert list(table.index) == [0, 1, 2]
    assert table["reward"].tolist()[1:] == [0.125, 0.5]
    assert table["push_bytes"].isna().tolist() == [True, False, True]
    assert "time" not in result.table()


def test_the_plot_has_a_curve_a_metric_without_steps_that_lack_it(result: RunResult) -> None:
    figure = result.plot("eval_exact_match", "loss")
    (evaluated, loss) = figure.axes
    assert evaluated.get_title() == "eval_exact_match"
    assert evaluated.lines[0].get_xydata().tolist() == [[0, 0.25], [2, 0.75]]
    assert loss.lines[0].get_xydata().tolist() == [[2, 0.5]]
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert [axes.get_title() for axes in result.plot().axes] == [
        "eval_exact_match",
        "loss",
        "reward",
    ]
    with pytest.raises(KeyError, match="No step has the metric rewrad"):
        result.plot("rewrad")


def test_a_notebook_shows_first_and_last_figures(result: RunResult) -> None:
    page = result._repr_html_()
    assert "<tr><th>reward</th><td>0.125</td><td>0.5</td></tr>" in page
    assert "finished" in page
