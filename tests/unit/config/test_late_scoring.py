"""When the update's own forward pass may say what the log-probs before it were."""

from pathlib import Path

import pytest

from rftmega.config import load
from tests.tiny_models import save_tiny


@pytest.mark.parametrize(
    ("options", "late"),
    [
        ([], True),
        (["algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.1", "algorithm.correction=token"], True),
        (["algorithm.advantage=gae", "algorithm.refill_rounds=2"], True),
        (["algorithm.mini_batches=2"], False),
        (["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], False),
        (["algorithm.max_staleness=1"], False),
        (["model.dropout=0.1"], False),
    ],
)
def test_it_may_where_one_update_computes_what_a_scoring_pass_would_and_nothing_asks_before(
    options: list[str], late: bool, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("data: {train: nowhere}\n")
    config = load(tmp_path / "run.yaml", [f"model.path={save_tiny(tmp_path / 'model', 'qwen3')}", *options])
    assert config.late_scoring is late
