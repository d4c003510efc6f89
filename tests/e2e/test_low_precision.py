"""Runs whose engine computes with weights of 8 bits, and which are corrected for that."""

from pathlib import Path

from tests.e2e.conftest import train_rl
from tests.e2e.test_backends import run_body, steps_of
from tests.ranks import run_ranks

FP8 = "rollout.quantization=fp8"


def test_a_run_learns_from_an_engine_of_8_bits_with_a_correction(
    arithmetic: Path, tmp_path: Path
) -> None:
    gaps = {}
    for name, options in (
        ("exact", ()),
        ("fp8", (FP8, "algorithm.importance_sampling=token")),
    ):
        given = (f"trainer.output={tmp_path / name}", "model.dtype=float32", *options)
        run_ranks(2, run_body, arithmetic / "run.yaml", "megatron", *given)
        steps = steps_of(tmp_path / name)
        assert len(steps) == 3
        gaps[name] = [line["logprob_gap_mean"] for line in steps]
    assert max(gaps["exact"]) < 1e-5
    assert min(gaps["fp8"]) > 1e-4, "the engine's weights are not rounded"


def test_what_can_not_compute_with_8_bits_is_refused_by_name(arithmetic: Path) -> None:
    said = train_rl(
        arithmetic / "run.yaml",
        FP8,
        "strategy=separate",
        "rollout.engine=sglang",
        "rollout.transport=checkpoint",
        "--processes",
        "1",
    )
    assert said.returncode == 2
    assert "needs rollout.engine=vllm or transformers, not sglang" in said.stderr
    assert "for servers without this package, which quantise nothing" in said.stderr
    assert "Correct that by algorithm.importance_sampling=token" in said.stderr
