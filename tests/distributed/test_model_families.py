"""Models of other architectures through a training run on FSDP2: rows of the table that
`python -m tests.families` makes.
"""

import json
from pathlib import Path

import pytest

from tests import families
from tests.families import (
    BOUNDS,
    STAGES,
    TABLE,
    causal_types,
    row_of,
    types_with_media,
    verdict,
    vllm_row,
)

ROWS = json.loads(TABLE.read_text())["rows"]
VERDICTS = {row["type"]: row["verdict"] for row in ROWS}
# a router's correction bias; a soft cap; tensors of three sizes in one; a state instead of a cache;
# layers without positions; an inner decoder; a table of experts; tensors that several parameters are
# parts of
UNLIKE = (
    *("deepseek_v3", "gemma2", "olmo_hybrid", "mamba2", "opt", "llama4_text"),
    *("deepseek_v4", "hrm_text"),
)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(each, marks=[] if each in UNLIKE else [pytest.mark.ranks])
        for each in causal_types() + types_with_media()
    ],
)
def test_a_model_trains_as_transformers_does_or_is_refused_as_the_docs_say(
    model_type: str,
) -> None:
    row = row_of(model_type)
    assert verdict(row) == VERDICTS[model_type], row
    if model_type in UNLIKE:
        assert verdict(row) == "ok", row
        assert set(STAGES) <= row.keys()


def test_the_table_of_the_docs_has_a_row_for_every_language_model_of_transformers() -> None:
    assert list(VERDICTS) == causal_types() + types_with_media()
    assert all(verdict(row) == row["verdict"] for row in ROWS)
    assert set(VERDICTS.values()) == {"ok", "refused"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "model_type",
    [
        row["type"]
        for row in ROWS
        if isinstance(row.get("vllm"), float) and row["vllm"] <= BOUNDS["push"]
    ],
)
def test_a_model_answers_in_vllm_as_in_the_trainer_before_and_after_a_step(model_type: str) -> None:
    row = vllm_row(model_type)
    assert isinstance(row["vllm"], float), row
    assert row["vllm"] <= BOUNDS["push"], row


def test_a_row_that_is_measured_anew_keeps_the_cell_of_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "TABLE", tmp_path / "table.json")
    known = [{"type": "qwen2", "verdict": "ok", "vllm": 2e-6}, {"type": "qwen3", "vllm": "no"}]
    (tmp_path / "table.json").write_text(json.dumps({"rows": known}))
    families.write_table([{"type": "qwen2", "refused": "why", "seconds": 1.0}])
    assert json.loads((tmp_path / "table.json").read_text())["rows"] == [
        {"type": "qwen2", "refused": "why", "verdict": "refused", "vllm": 2e-6},
        {"type": "qwen3", "vllm": "no"},
    ]
