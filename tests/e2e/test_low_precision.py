"""Runs whose engine computes with weights of 8 bits, and which are corrected for that."""

from pathlib import Path

import pytest

from rftmega.config.load import load
from rftmega.core.errors import ConfigError
from rftmega.run.preflight import preflight
from tests.e2e.test_backends import run_body, steps_of
from tests.ranks import run_ranks

FP8 = "rollout.quantization=fp8"


def test_a_run_learns_from_an_engine_of_8_bits_with_a_correction(
    arithmetic: Path, tmp_path: Path
) -> None:
    given = (f"trainer.output={tmp_path}", "model.dtype=float32", "trainer.steps=2", FP8)
    given += ("algorithm.importance_sampling=token",)
    run_ranks(2, run_body, arithmetic / "run.yaml", "megatron", *given)
    gaps = [line["logprob_gap_mean"] for line in steps_of(tmp_path)]
    assert len(gaps) == 2
    assert min(gaps) > 1e-4, "the engine's weights are not rounded"


def test_what_can_not_compute_with_8_bits_is_refused_by_name(arithmetic: Path) -> None:
    given = ("strategy=separate", "rollout.engine=sglang", "rollout.transport=checkpoint")
    with pytest.raises(ConfigError) as caught:
        preflight(load(arithmetic / "run.yaml", (FP8, *given)), 1)
    said = str(caught.value)
    assert "needs rollout.engine=vllm or transformers, not sglang" in said
    assert "for servers without this package, which quantise nothing" in said
    assert "Correct that by algorithm.importance_sampling=token" in said
