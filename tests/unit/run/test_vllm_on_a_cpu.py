"""Models that vLLM doesn't compute on a CPU, or computes otherwise, are refused before one is built."""

import json
from pathlib import Path

import pytest

from rftmega.config import ParallelConfig
from rftmega.core.errors import ConfigError
from rftmega.run.preflight import preflight
from tests.families import TABLE
from tests.family_configs import tiny_config
from tests.tiny_models import save_tiny
from tests.unit.run.test_preflight import config_of

SIZES = "know no gated delta nets with linear_key_head_dim={} and linear_value_head_dim={}, only"
DTYPE = "in bfloat16 only, and model.dtype={} is float32 here"


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize(
    ("variant", "dtype", "heads", "complaints"),
    [
        ("qwen3.5", "bfloat16", (64, 64), []),
        ("qwen3-next-moe", "bfloat16", (128, 128), []),
        ("qwen3.5", "float32", (64, 64), [DTYPE.format("float32")]),
        ("qwen3.5", "auto", (64, 64), [DTYPE.format("auto")]),
        ("qwen3.5", "bfloat16", (32, 32), [SIZES.format(32, 32)]),
        ("qwen3.5", "bfloat16", (64, 128), [SIZES.format(64, 128)]),
        ("qwen3.5-moe", "auto", (16, 12), [DTYPE.format("auto"), SIZES.format(16, 12)]),
    ],
)
def test_gated_delta_nets_that_the_kernels_do_not_know_are_refused(
    variant: str,
    dtype: str,
    heads: tuple[int, int],
    complaints: list[str],
    backend: str,
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, variant, ParallelConfig(), "vllm")
    sizes = dict(zip(("linear_key_head_dim", "linear_value_head_dim"), heads, strict=True))
    save_tiny(tmp_path, variant, **sizes)
    config.backend, config.model.dtype = backend, dtype  # type: ignore[assignment]
    said = ""
    try:
        preflight(config, 1)
    except ConfigError as error:
        said = str(error)
    assert said.count("\n  - ") == len(complaints), said
    assert all(complaint in said for complaint in complaints)
    config.rollout.engine = "transformers"
    preflight(config, 1)


@pytest.mark.parametrize(
    ("model_type", "changes", "size"),
    [
        ("axk2", {}, 64),
        ("deepseek_v2", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 0),
        ("deepseek_v2", {"kv_lora_rank": 512}, 544),
        ("minicpm3", {}, 0),
    ],
)
def test_latent_attention_of_a_size_that_the_kernels_do_not_know_is_refused_on_any_backend(
    model_type: str, changes: dict[str, int], size: int, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "qwen3", ParallelConfig(), "vllm")
    given = tiny_config(model_type, 32)
    for name, value in changes.items():
        setattr(given, name, value)
    given.save_pretrained(tmp_path)
    config.backend = "fsdp"
    said = ""
    try:
        preflight(config, 1)
    except ConfigError as error:
        said = str(error)
    assert ("kv_lora_rank + qk_rope_head_dim = 576 only" in said) == bool(size)
    assert f"not {size}." in said or not size


def test_a_type_that_vllm_computes_otherwise_is_refused_before_the_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3", ParallelConfig(), "vllm")
    tiny_config("cohere2", 32).save_pretrained(tmp_path)
    config.backend = "fsdp"
    with pytest.raises(ConfigError, match="gives model_type=cohere2 other log-probs than"):
        preflight(config, 1)


def test_each_measured_type_passes_the_gate_of_a_run_or_is_refused() -> None:
    rows = json.loads(TABLE.read_text())["rows"]
    measured = [row["vllm"] for row in rows if isinstance(row.get("vllm"), float)]
    assert len(measured) > 60
    assert max(measured) <= 1e-3
