"""An exported folder's config.json states the dtype of its tensors, whatever the folder that was
trained stated: both backends.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rftmega.config import ParallelConfig, TrainerConfig
from rftmega.run.placement.export import export
from tests.layouts import build_policy
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny


def exported_body(world: Any, folder: Path, target: Path, backend: str, dtype: str) -> None:
    policy = build_policy(folder, ParallelConfig(), backend=backend, dtype=dtype)
    export(policy, target, TrainerConfig())


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize(("given", "trained"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_an_export_states_the_dtype_of_its_tensors(
    given: str, trained: str, backend: str, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "plain", "qwen3"))
    plain.to(getattr(torch, given)).save_pretrained(tmp_path / "given")
    assert json.loads((tmp_path / "given/config.json").read_text())["dtype"] == given
    run_ranks(1, exported_body, tmp_path / "given", tmp_path / "exported", backend, trained)
    (file,) = (tmp_path / "exported").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {getattr(torch, trained)}
    assert json.loads((tmp_path / "exported/config.json").read_text())["dtype"] == trained
