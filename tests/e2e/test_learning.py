"""The demo learns under every layout, and every recipe of examples/arithmetic with every seed: run by `make learning`."""

import json
import os
import subprocess
import sys

import pytest

from tests import learning
from tests.e2e.conftest import ROOT

LAYOUTS = {"TP2-PP2": (4, 2, 2), "DP4": (4, 1, 1), "TP4": (4, 4, 1), "PP4": (4, 1, 4), "one-process": (1, 1, 1)}


@pytest.mark.learning
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_held_out_accuracy_rises_by_20_points(layout: str) -> None:
    processes, tensor, pipeline = LAYOUTS[layout]
    output = f"runs/learning/{layout}"
    overrides = [f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}", f"trainer.output={output}"]
    demo = [sys.executable, str(ROOT / "examples/arithmetic/demo.py"), "--processes", str(processes), *overrides]
    subprocess.run(demo, check=True, timeout=900, cwd=ROOT)
    summary = json.loads((ROOT / output / "summary.json").read_text())
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.2
    assert summary["logprob_gap_max"] < 1e-4


@pytest.mark.learning
@pytest.mark.parametrize("name", list(learning.RUNS))
def test_a_recipe_learns_what_is_asked_of_it_with_every_seed(name: str) -> None:
    records = learning.Learning(len(os.sched_getaffinity(0)))([name])
    assert [record["seed"] for record in records] == list(learning.SEEDS)
    asked = learning.RUNS[name]
    for record in records:
        assert record["after"] - record["before"] >= asked.rise - 1e-9, record["command"]
        assert record["after"] >= asked.end, record["command"]
        assert (record["logprob_gap_max"] or 0.0) < 1e-4
