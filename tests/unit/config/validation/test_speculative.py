"""Speculative decoding is refused where it could not work or would change a result."""

from pathlib import Path

import pytest

from rftmega.config import load
from rftmega.config.validation.speculative import speculative

LOOKUP = ["rollout.engine=vllm", "rollout.speculative=lookup"]
MODEL = ["rollout.engine=vllm", "rollout.speculative=draft_model"]


def reasons(config_file: Path, *options: str) -> list[str]:
    return speculative(load(config_file, list(options)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            [*LOOKUP, "rollout.engine=transformers"],
            "type=lookup needs rollout.engine=vllm, not transf",
        ),
        ([*LOOKUP, "strategy=separate", "rollout.transport=checkpoint"], "is for others"),
        ([*LOOKUP, "rollout.router_replay=engine"], "the experts of rejected tokens"),
        ([*LOOKUP, "trainer.eval_min_p=0.1"], "(trainer.eval_min_p=0.1). Set eval_min_p to 0"),
        (MODEL, "needs rollout.speculative.path, a model folder"),
        ([*MODEL, "rollout.speculative.path=nowhere"], "path=nowhere is no model folder"),
    ],
)
def test_speculative_decoding_that_cannot_work_is_refused(
    options: list[str], said: str, config_file: Path
) -> None:
    (reason,) = reasons(config_file, *options)
    assert said in reason


def test_speculative_decoding_that_works_is_not_refused(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert reasons(config_file, *LOOKUP, "rollout.router_replay=trainer") == []
    assert reasons(config_file, *MODEL, f"rollout.speculative.path={tmp_path}") == []
    assert reasons(config_file, "rollout.engine=transformers", "trainer.eval_min_p=0.1") == []
