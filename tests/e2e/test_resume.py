"""A run that was ended and started again, from its command line: numbers and weights are those of a
run that nothing ended.
"""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rftmega.checkpoints.code_versions import code_versions
from tests.e2e.conftest import numbers_of, several_runs

OPTIONS = [
    "--processes", "2", "parallel.pipeline=2", "checkpoint.every=2", "checkpoint.hf=true", "trainer.export=true", "data.eval=",
]  # fmt: skip
REFILLED = "refilled groups and earlier answers"
PARTIAL = "rollouts that go on in later steps"
KINDS = {
    "a critic, an average, adaptive KL and running moments": [
        "algorithm.advantage=gae", "algorithm.ema_beta=0.9", "reward.shaping.normalise=true", "algorithm.kl.coef=0.1",
        "algorithm.kl.placement=reward", "algorithm.kl.target=0.01", "algorithm.updates_per_epoch=2",
    ],
    REFILLED: [
        "algorithm.dynamic_sampling.max_rounds=2", "algorithm.replay.max_age=2", "algorithm.importance_sampling=token",
    ],
    PARTIAL: [
        "trainer.max_staleness=2", "algorithm.importance_sampling=token", "rollout.max_response_tokens=40",
        "rollout.max_batch=8", "trainer.prompts_per_step=4",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [kind if kind == PARTIAL else pytest.param(kind, marks=pytest.mark.ranks) for kind in KINDS],
)
def test_a_run_that_is_started_again_gives_the_numbers_and_the_weights_of_one_that_was_not_ended(
    kind: str, arithmetic: Path, tmp_path: Path
) -> None:
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    runs = [
        [
            str(arithmetic / "run.yaml"),
            f"trainer.output={output}",
            f"trainer.steps={steps}",
            *OPTIONS,
            *KINDS[kind],
        ]
        for output, steps in ((whole, 4), (ended, 2), (ended, 4))
    ]
    done = several_runs(runs)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    resumed = said.index(f"resumed from {ended / 'checkpoints/step_000002'}")
    changes = [line for line in said[resumed + 1 :] if line.startswith("  ") and '"' not in line]
    assert changes == ["  trainer.steps: 2 -> 4"]
    manifest = json.loads((ended / "checkpoints/step_000004/manifest.json").read_text())
    assert manifest["code"] == code_versions()
    assert numbers_of(whole)[-1]["step"] == 4
    numbers = numbers_of(whole)
    assert numbers_of(ended) == numbers
    if kind == PARTIAL:
        assert any(step["mixed_answers"] > 0 for step in numbers[1:]), "nothing went on"
        assert max(step["staleness_max"] for step in numbers[1:]) in (1, 2)
    for folder in ("policy", "checkpoints/step_000004/hf"):
        weights, others = (
            load_file(output / folder / "model-00001-of-00001.safetensors")
            for output in (whole, ended)
        )
        assert weights.keys() == others.keys()
        assert all(tensor.equal(others[name]) for name, tensor in weights.items()), folder
