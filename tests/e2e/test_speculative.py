"""Speculative decoding changes how fast a run is, and nothing else."""

from pathlib import Path

import pytest

from tests.e2e.test_backends import run_body, steps_of
from tests.ranks import VLLM, run_ranks

PRELOADED = VLLM
SAME = ("reward", "loss", "grad_norm", "response_length", "logprob_gap_mean")


def test_a_run_with_drafts_has_the_results_of_one_without(arithmetic: Path, tmp_path: Path) -> None:
    found = {}
    for kind in ("none", "lookup"):
        given = (
            f"trainer.output={tmp_path / kind}",
            "model.dtype=float32",
            "trainer.steps=3",
            "rollout.engine=vllm",
            f"rollout.speculative={kind}",
        )
        if kind == "lookup":
            given += ("rollout.speculative.least_acceptance=0.01",)
        run_ranks(2, run_body, arithmetic / "run.yaml", "megatron", *given)
        found[kind] = steps_of(tmp_path / kind)
    for plain, drafted in zip(found["none"], found["lookup"], strict=True):
        for name in SAME:
            assert drafted[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name
        assert drafted["speculative_drafted_tokens"] > 0
        assert 0 <= drafted["speculative_acceptance"] <= 1
        assert not any(name.startswith("speculative") for name in plain)
