"""Files with the completions of evaluations."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rftmega.core.types import Prompt, Rollout, Sampling
from rftmega.monitoring.observers.evaluate import Answering, Evaluate, Evaluated
from rftmega.monitoring.observers.evaluation_files import EvaluationFiles
from tests.rollouts import answered
from tests.unit.monitoring.observers.test_evaluate import EASY, HARD, Completions, Trainer, seven


def text(ids: Any) -> str:
    return ",".join(map(str, ids))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_every_completion_of_every_set_is_written_with_its_scores(tmp_path: Path) -> None:
    engine = Completions({EASY[0]: [7, 5], EASY[1]: [8, 7], HARD[0]: [4, 7]})
    files = EvaluationFiles(tmp_path / "evaluations", text)
    sets = {"easy": EASY, "hard": HARD}
    answering = Answering(samples=2, sampling=Sampling(0.5))
    Evaluate(sets, seven, answering, every=0, last=1, reports=[files]).evaluate(Trainer(engine))
    found = lines_of(tmp_path / "evaluations/step_000000.jsonl.gz")
    assert [(each["set"], each["index"], each["sample"], each["tokens"]) for each in found] == [
        ("easy", 0, 0, [7]),
        ("easy", 0, 1, [5]),
        ("easy", 1, 0, [8]),
        ("easy", 1, 1, [7]),
        ("hard", 0, 0, [4]),
        ("hard", 0, 1, [7]),
    ]
    assert [each["scores"]["reward"] for each in found] == [1, 0, 0, 1, 0, 1]
    assert found[4] == {
        "step": 0, "set": "hard", "adapter": "", "index": 0, "sample": 0, "prompt": "3", "label": "",
        "response": "4", "tokens": [4], "truncated": False,
        "scores": {"exact_match": 0, "half": 0, "reward": 0},
    }  # fmt: skip


def test_a_lost_rollout_says_why_and_has_no_response(tmp_path: Path) -> None:
    lost = Rollout((), lost="the tool's server is away")
    whole = answered((5,), reason="length")
    EvaluationFiles(tmp_path, text)(
        3,
        [
            Evaluated("", "", 0, Prompt((1, 2), "x", 4), lost, {}),
            Evaluated("", "frozen", 0, Prompt((1, 2), "x", 4), whole, {"reward": float("nan")}),
        ],
    )
    first, second = lines_of(tmp_path / "step_000003.jsonl.gz")
    assert first["lost"] == "the tool's server is away"
    assert "response" not in first and first["label"] == "x" and first["prompt"] == "1,2"
    assert second["truncated"] and second["adapter"] == "frozen"
    assert second["scores"] == {"reward": None}


@pytest.mark.parametrize("step", [0, 2])
def test_a_new_run_keeps_an_earlier_runs_files_and_a_resumed_one_goes_on_among_them(
    step: int, tmp_path: Path
) -> None:
    folder = tmp_path / "evaluations"
    files = EvaluationFiles(folder, text)
    one = [Evaluated("", "", 0, Prompt((1,)), answered((5,)), {})]
    files(1, one)
    files(step, one)
    kept = folder if step else tmp_path / "evaluations.1"
    assert (kept / "step_000001.jsonl.gz").is_file()
    assert (folder / f"step_{step:06d}.jsonl.gz").is_file()
