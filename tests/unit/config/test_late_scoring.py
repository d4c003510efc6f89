"""When the update's own forward pass may say what the log-probs before it were."""

from pathlib import Path

import pytest

from rftmega.config import load
from tests.tiny_models import save_tiny


@pytest.mark.parametrize(
    ("options", "late"),
    [
        ([], True),
        (
            [
                "algorithm.kl.coef=0.1",
                "algorithm.entropy_coef=0.1",
                "algorithm.importance_sampling=token",
            ],
            True,
        ),
        (["algorithm.advantage=gae", "algorithm.dynamic_sampling.max_rounds=2"], True),
        (["algorithm.updates_per_epoch=2"], False),
        (["algorithm.epochs_per_rollout=2"], False),
        (["algorithm.kl.coef=0.1", "algorithm.kl.placement=reward"], False),
        (["algorithm.replay.max_age=1"], False),
        (
            [
                "algorithm.on_policy_share=0.75",
                "data.ptx=some.jsonl",
                "algorithm.teachers=[{path: self}]",
            ],
            False,
        ),
        (["algorithm.teachers=[{path: self}]"], True),
        (["model.dropout=0.1"], False),
        (["rollout.on_update=keep"], False),
    ],
)
def test_it_may_where_one_update_computes_what_a_scoring_pass_would_and_nothing_asks_before(
    options: list[str], late: bool, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("data: {train: nowhere}\n")
    config = load(
        tmp_path / "run.yaml", [f"model.path={save_tiny(tmp_path / 'model', 'qwen3')}", *options]
    )
    assert config.late_scoring is late
