"""The demo learns under every layout, and every recipe of examples/arithmetic with every seed: run
by `make learning`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import learning
from tests.e2e.conftest import ROOT

LAYOUTS = {
    "TP2-PP2": (4, 2, 2),
    "DP4": (4, 1, 1),
    "TP4": (4, 4, 1),
    "PP4": (4, 1, 4),
    "one-process": (1, 1, 1),
}


@pytest.mark.learning
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_held_out_accuracy_rises_by_20_points(layout: str) -> None:
    processes, tensor, pipeline = LAYOUTS[layout]
    output = f"runs/learning/{layout}"
    overrides = [
        f"parallel.tensor={tensor}",
        f"parallel.pipeline={pipeline}",
        f"trainer.output={output}",
    ]
    demo = [
        sys.executable,
        str(ROOT / "examples/arithmetic/demo.py"),
        "--processes",
        str(processes),
        *overrides,
    ]
    subprocess.run(demo, check=True, timeout=900, cwd=ROOT)
    summary = json.loads((ROOT / output / "summary.json").read_text())
    accuracy = summary["evaluation"]["eval_exact_match"]
    assert accuracy["last"] - accuracy["first"] >= 0.2
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
        assert asked.met(record["before"], record["after"], record["swapped"] or 0.0)
        assert (record["logprob_gap_max"] or 0.0) < asked.gap


def test_a_run_that_has_ended_is_repeated_only_where_what_it_trained_from_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    weights, run = (
        tmp_path / "runs/demo/model/model.safetensors",
        tmp_path / "runs/learning/ppo-1" / learning.RECORD,
    )
    data = tmp_path / "runs/demo/data/train.jsonl"
    for file in (weights, run, data):
        file.parent.mkdir(parents=True)
    for file in (weights, data, data.with_name("eval.jsonl")):
        file.write_bytes(b"some")
    assert learning.done("ppo", 1) is None
    run.write_text(json.dumps({"settings": learning.settings_of("ppo", 1), "after": 0.5}))
    record = learning.done("ppo", 1)
    assert record and record["after"] == 0.5
    run.write_text(json.dumps({"settings": learning.settings_of("ppo", 2)}))
    assert learning.done("ppo", 1) is None
    run.write_text(json.dumps(record))
    weights.write_bytes(b"another")
    assert learning.done("ppo", 1) is None


def test_every_recipe_of_the_examples_is_in_the_table() -> None:
    files = learning.EXAMPLES.glob("*/recipes/*.yaml")
    assert {(file.parents[1].name, file.stem) for file in files} == {
        (asked.example, name) for name, asked in learning.RUNS.items()
    }


def test_what_is_asked_is_a_rise_and_an_end() -> None:
    assert learning.Asked(rise=0.2).met(0.445, 0.645)
    assert not learning.Asked(rise=0.2).met(0.445, 0.64)
    assert not learning.Asked(end=0.9).met(0.0, 0.899)
    assert learning.Asked(end=0.5, at_most_swapped=0.3).met(0.0, 0.5, 0.3)
    assert not learning.Asked(end=0.5, at_most_swapped=0.3).met(0.0, 0.5, 0.31)


def test_thoughts_are_equal_sums_and_of_no_prompt_that_is_trained_from_or_held_out(
    tmp_path: Path,
) -> None:
    import make_data

    make_data.write(tmp_path)
    given = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        for name in ("thoughts", "train", "eval")
    }
    for example in given["thoughts"]:
        thought, completion = example["label"].split("=")
        asked = example["prompt"].removesuffix("=")
        assert (
            sum(map(int, asked.split("+"))) == sum(map(int, thought.split("+"))) == int(completion)
        )
    prompts = {example["prompt"] for example in given["thoughts"]}
    assert prompts.isdisjoint(
        example["prompt"] for name in ("train", "eval") for example in given[name]
    )
    assert len({(example["prompt"], example["label"]) for example in given["thoughts"]}) > 4 * len(
        prompts
    )
