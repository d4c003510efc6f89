"""tools/plan.py for models that no machine here could hold."""

import json
from pathlib import Path

import pytest

from tools import plan

ROOT = Path(__file__).parents[3]
PLANS = {"llama-3-70b": 64, "qwen3-235b-a22b": 256, "deepseek-v3": 512}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the examples' model.path is relative to it


def given(name: str, *more: str) -> list[str]:
    return [
        f"examples/planning/{name}/run.yaml",
        "--gpus",
        str(PLANS[name]),
        "--gpu-memory",
        "80",
        *more,
    ]


@pytest.mark.parametrize("name", list(PLANS))
def test_large_models_are_planned_and_fit_where_their_example_says_so(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(given(name)) == 0
    said = capsys.readouterr().out
    assert "All of it fits." in said
    assert max(map(len, said.splitlines())) <= plan.WIDTH
    for phase in ("rollout", "score", "update", "push"):
        assert f"\n{phase} " in said


def test_what_does_not_fit_is_said_with_the_nearest_layout_that_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = ["parallel.pipeline=1"]
    assert plan.main(given("llama-3-70b", *wrong)) == 1
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= plan.WIDTH
    assert "update on stage 0 needs 100.6 GB of 80" in said
    assert plan.main(given("llama-3-70b", *wrong, "--json")) == 1
    found = json.loads(capsys.readouterr().out)
    changes = found["proposal"]["changes"]
    assert changes.keys() == {"parallel.pipeline"}
    assert {"trainer.max_tokens_per_micro_batch": 4096} in [
        rejected["changes"] for rejected in found["rejected"]
    ]
    assert (
        plan.main(given("llama-3-70b", *(f"{name}={value}" for name, value in changes.items())))
        == 0
    )


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["parallel.tensor=3"], "number of attention heads"),
        (["--gpu-memory", "2"], "more than --reserved-gb"),
        (["--nic-gbs", "0"], "must be positive"),
        (["parallel.tensr=2"], "Did you mean parallel.tensor?"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    more: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(given("llama-3-70b", *more)) == 2
    assert complaint in capsys.readouterr().err
