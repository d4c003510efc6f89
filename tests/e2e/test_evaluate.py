"""`rftmega evaluate` gives the numbers of a run's own evaluation."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, Run, metrics_of
from tests.warm_command import run_warm

SAMPLED = ("trainer.eval_samples=4", "trainer.eval_temperature=1.0", "trainer.eval_pass_at=[1,2]")


def evaluated(*arguments: object) -> subprocess.CompletedProcess[str]:
    program, given = ROOT / "tools/evaluate.py", list(map(str, arguments))
    return run_warm(program, given, folder=ROOT, timeout=240, path=ROOT)


def models_in(output: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((output / "evaluation.json").read_text())["models"]
    return found


def of_evaluation(metrics: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith("eval_") and name != "eval_seconds"
    }


@pytest.mark.ranks
def test_an_evaluation_goes_on_where_it_broke_off_by_group_and_with_more_samples(
    arithmetic: Path, tmp_path: Path
) -> None:
    records = [json.loads(line) for line in (arithmetic / "eval.jsonl").read_text().splitlines()]
    data, output = tmp_path / "data.jsonl", tmp_path / "out"
    with data.open("w") as file:
        for number, record in enumerate(records):
            file.write(json.dumps(record | {"level": number % 2}) + "\n")
    command = (
        *(arithmetic / "model", "--config", arithmetic / "run.yaml", "--data", data),
        *("--by", "level", "--output", output, "--part", 3, "trainer.eval_temperature=1.0"),
    )
    done = evaluated(*command, "--samples", 2, "--json")
    assert done.returncode == 0, done.stderr
    (model,) = json.loads(done.stdout)["models"]
    (own,) = model["sets"].values()
    assert {name: each["pass@2"]["prompts"] for name, each in own["groups"].items()} == {
        "0": 4,
        "1": 4,
    }
    (file,) = (output / "completions").iterdir()
    lines = file.read_text().splitlines()
    assert len(lines) == 16
    file.write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])  # as a killed process leaves it
    done = evaluated(*command, "--samples", 2)
    assert done.returncode == 0, done.stderr
    assert "16 of 16 completions" in done.stderr
    assert "8 of 16" in done.stderr  # the five that were there, and three more
    assert models_in(output) == [model]
    assert sorted(file.read_text().splitlines()) == sorted(lines)
    done = evaluated(*command, "--samples", 3)
    assert done.returncode == 0, done.stderr
    assert file.read_text().splitlines()[:5] == lines[:5]
    assert len(file.read_text().splitlines()) == 24
    done = evaluated(*command, "--samples", 3, "trainer.eval_temperature=0.5")
    assert done.returncode == 2
    assert "trainer.eval_temperature: 1.0 -> 0.5" in done.stderr


def test_what_can_not_be_evaluated_is_told_before_a_model_is_loaded(
    arithmetic: Path, tmp_path: Path
) -> None:
    output = ("--output", tmp_path / "out")
    given = (arithmetic / "model", "--config", arithmetic / "run.yaml", *output)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1+1="}\n')
    for asked, reason in (
        (("--data", bad), "label"),
        (("--rewards", "nowhere.py:f"), "nowhere.py"),
        (("--by", "level"), "no such column"),
        (("trainer.eval_sample=2",), "Did you mean trainer.eval_samples?"),
    ):
        done = evaluated(*given, *asked)
        assert done.returncode == 2, (asked, done.stderr)
        assert reason in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.ranks
def test_the_policies_of_a_run_get_the_numbers_of_its_own_evaluation(
    arithmetic: Path, train: Run, tmp_path: Path
) -> None:
    """From its stored options alone, by another backend; with adapters as with merged weights."""
    run, output = tmp_path / "run", tmp_path / "run/evaluation"
    done = train(
        *(
            arithmetic / "run.yaml",
            f"trainer.output={run}",
            "rollout.engine=transformers",
            *SAMPLED,
        ),
        *("trainer.steps=2", "trainer.eval_every=1", "trainer.export=true", "checkpoint.every=1"),
        *("checkpoint.hf=true", "optimizer.learning_rate=0.1", "model.lora.rank=4"),
    )
    assert done.returncode == 0, done.stderr
    first, *own = [of_evaluation(step) for step in metrics_of(run)]
    assert len({json.dumps(each) for each in (first, *own)}) == 3, "the steps changed nothing"
    done = evaluated(run)
    assert done.returncode == 0, done.stderr
    models = models_in(output)
    assert [each["model"] for each in models] == ["step_000001", "step_000002", "policy"]
    assert [each["metrics"] for each in models] == [own[0], own[1], own[1]]
    assert "pass@2" in (output / "evaluation.html").read_text()
    adapted = tmp_path / "adapted"
    done = evaluated(
        *(arithmetic / "model", "--config", run / "run.json", "--output", adapted),
        *("--adapter", f"{run}/policy_adapter"),
    )
    assert done.returncode == 0, done.stderr
    assert models_in(adapted)[0]["metrics"] == own[1]
