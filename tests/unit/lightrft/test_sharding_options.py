"""LightRFT's options of sharding, as overrides of a config that a run can have."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rftmega.config import load
from rftmega.config.validation.backend import backend
from rftmega.lightrft.sharding_options import sharding_overrides


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"zero_stage": 1}, {"optimizer.distributed": True, "backend": "megatron"}),
        ({}, {"parallel.reshard_after_forward": False, "backend": "fsdp"}),
        ({"zero_stage": 3}, {"parallel.reshard_after_forward": True, "backend": "fsdp"}),
        ({"fsdp": True, "zero_stage": 1}, {"backend": "fsdp", "parallel.cpu_offload": False}),
        ({"fsdp": True, "fsdp_cpu_offload": True}, {"parallel.cpu_offload": True}),
        ({"zero_stage": 2, "adam_offload": True}, {"parallel.cpu_offload": True}),
        ({"zero_stage": 1, "sp_size": 2}, {"parallel.context": 2}),
        ({"bf16": True}, {"model.dtype": "bfloat16"}),
        ({"bf16": False, "gradient_checkpointing": True}, {"model.dtype": "float32", "parallel.recompute": "full"}),
    ],
)  # fmt: skip
def test_each_option_becomes_one_that_a_run_can_have(
    given: dict[str, Any], wanted: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: x}")
    config = load(tmp_path / "run.yaml", sharding_overrides(SimpleNamespace(**given)))
    assert backend(config, 4) == []
    for name, value in wanted.items():
        found: Any = config
        for part in name.split("."):
            found = getattr(found, part)
        assert found == value, name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"zero_stage": 0}, "zero_stage=0"),
        ({"zero_stage": 1, "adam_offload": True}, "adam_offload with zero_stage=1"),
        ({"fsdp": True, "sp_size": 2}, "sp_size=2 with backend=fsdp"),
    ],
)
def test_what_has_no_counterpart_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sharding_overrides(SimpleNamespace(**given))
