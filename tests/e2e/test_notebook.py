"""The notebook of the first steps, run as a reader would."""

import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from rftmega.run.notebook import line_of
from tests.e2e.conftest import ROOT, metrics_of

NOTEBOOK = ROOT / "examples/first_steps.ipynb"


def outputs(cell: Any, kind: str) -> list[str]:
    """Returns what a cell shows of one kind."""
    found = []
    for output in cell.get("outputs", []):
        found.append(output.get("data", {}).get(kind, ""))
        if kind == "text/plain" and output.output_type == "stream":
            found.append(output.text)
    return found


@pytest.mark.ranks
def test_the_first_steps_run_show_their_progress_and_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    steps = metrics_of(tmp_path / "runs/first_steps/run")
    assert [step["step"] for step in steps] == list(range(31))
    rewards = [step["reward"] for step in steps[1:]]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, "the reward rises visibly"
    assert steps[-1]["eval_accuracy"] > max(0.5, steps[0]["eval_accuracy"] + 0.1)
    assert steps[-1]["logprob_gap_max"] < 1e-4
    (training,) = [cell for cell in code if "rftmega.train(" in cell.source]
    said = "\n".join(outputs(training, "text/plain"))
    assert "step 30 of 30" in said
    assert "it/s" not in said, "a bar that knows no cells"
    page = "\n".join(outputs(training, "text/html"))
    shown = re.search(r"<th>eval_accuracy</th><td>([\d.]+)</td><td>([\d.]+)</td>", page)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(steps[0]["eval_accuracy"], rel=1e-3)
    assert float(shown[2]) == pytest.approx(steps[-1]["eval_accuracy"], rel=1e-3)
    (completions,) = [cell for cell in code if "policy.generate(" in cell.source]
    lines = "\n".join(outputs(completions, "text/plain")).splitlines()
    asked = [line.split()[-1] for line in lines if "=" in line]
    assert len(asked) == 10
    assert asked.count("right") > 5, "most completions of the trained model are right"
    (table,) = [cell for cell in code if "result.table(" in cell.source]
    assert f"{steps[-1]['reward']:.6f}"[:6] in "\n".join(outputs(table, "text/plain"))
    (plot,) = [cell for cell in code if "result.plot(" in cell.source]
    assert any(outputs(plot, "image/png")), "no image"


def test_the_line_below_a_cell_tells_the_time_left() -> None:
    history = [
        {"step": 0, "time": 100.0, "eval_reward": 0.5},
        {"step": 2, "time": 160.0, "loss": 0.25, "grad_norm": None},
    ]
    assert line_of(history, 100) == "step 2 of 100, 0:49:00 left: loss 0.25"
    assert line_of(history[:1], 100) == "step 0 of 100"
