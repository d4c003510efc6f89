"""A reference model that was replaced by another of the same shapes is noticed when a run goes on."""

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rftmega.checkpoints.run_checkpoints import TrainingCheckpoints
from rftmega.config import OptimizerConfig, ParallelConfig, RunConfig
from rftmega.core.errors import CheckpointError
from rftmega.run.train import built_backend
from tests.layouts import config_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
Case = tuple[str, ParallelConfig, str, float]  # backend, layout, dtype, weight of the KL
MEGATRON, FSDP = ("megatron", P(), "float32", 0.1), ("fsdp", P(), "float32", 0.1)


def chosen(model: Path, case: Case) -> RunConfig:
    backend, parallel, dtype, coef = case
    config = config_of(model, parallel, OptimizerConfig(), dtype=dtype)
    config.backend, config.algorithm.kl.coef = backend, coef  # type: ignore[assignment]
    return config


def body(world: Any, model: Path, folder: Path, case: Case, saves: bool) -> tuple[Any, str]:
    """Returns the reference's checksum, and why a checkpoint of `folder` is refused."""
    config = chosen(model, case)
    policy = built_backend(config).policy(config)
    kept = TrainingCheckpoints(folder, {"policy": policy}, config)
    told = ""
    try:
        kept.save({}, step=1) if saves else kept.resume()
        kept.wait()
    except CheckpointError as error:
        told = str(error)
    return policy.described().get("reference"), told


def counted(model: Path, dtype: torch.dtype) -> int:
    """Returns the checksum of a folder's weights, from its file."""
    words, total = {4: torch.int32, 2: torch.int16}[dtype.itemsize], 0
    for name, tensor in load_file(model / "model.safetensors").items():
        values = tensor.to(dtype).contiguous().view(words).flatten().to(torch.int64)
        total += zlib.crc32(name.encode()) * int(values.sum())
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_another_reference_is_refused_and_the_same_one_is_not_in_any_layout(
    backend: str, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path / "model", "qwen3")
    strange = save_tiny(tmp_path / "strange", "qwen3", seed=1)
    folder = tmp_path / "kept"
    expected = counted(model, torch.float32)
    ((found, told),) = run_ranks(1, body, model, folder, (backend, P(), "float32", 0.1), True)
    assert (found, told) == (expected, "")
    for case in (("megatron", P(pipeline=2), "float32", 0.1), ("fsdp", P(), "float32", 0.1)):
        assert run_ranks(2, body, model, folder, case, False) == [(expected, "")] * 2
    other = (backend, P(), "float32", 0.1)
    for found, told in run_ranks(2, body, strange, folder, other, False):
        assert found == counted(strange, torch.float32) != expected
        assert "It was trained against another reference" in told and str(strange) in told
    for found, told in run_ranks(1, body, strange, folder, (backend, P(), "float32", 0.0), False):
        assert found is None and told == "", "without a KL there is no reference"


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_the_checksum_is_of_the_weights_as_the_run_has_them(backend: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "qwen3")
    case = (backend, P(), "bfloat16", 0.1)
    for found, _ in run_ranks(2, body, model, tmp_path / "kept", case, True):
        assert found == counted(model, torch.bfloat16)
