"""A run's own checkpoint becomes the Hugging Face folder that the run itself exports, byte for byte."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.checkpoints.run_checkpoints import TrainingCheckpoints
from rftmega.config import LoRA, OptimizerConfig, ParallelConfig, TrainerConfig
from rftmega.run.placement.export import export
from rftmega.run.train import built_backend
from rftmega.tools import convert, inspect_checkpoint
from rftmega.trainer.experience import given
from tests.families import save_tiny_of
from tests.layouts import config_of, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig


class Case(NamedTuple):
    backend: Any
    parallel: ParallelConfig = P()  # noqa: RUF012  never changed
    rank: int = 0
    role: str = "policy"
    variant: str = "qwen3"
    dtype: str = "float32"


CASES = {
    "Megatron": Case("megatron", P(pipeline=2)),
    "Megatron, experts in bfloat16": Case("megatron", P(expert=2), variant="qwen3-moe", dtype="bfloat16"),
    "FSDP2": Case("fsdp"),
    "FSDP2, experts": Case("fsdp", variant="qwen3-moe"),
    "adapters on Megatron": Case("megatron", P(tensor=2), rank=4),
    "adapters on FSDP2": Case("fsdp", rank=4),
    "tables of whole numbers": Case("fsdp", variant="deepseek_v4"),
    "adapters beside tables of whole numbers": Case(
        "fsdp", rank=4, variant="deepseek_v4", dtype="bfloat16"
    ),
    "adapters, routers of float32 beside bfloat16": Case(
        "megatron", rank=4, variant="glm4-moe", dtype="bfloat16"
    ),
    "a value model": Case("megatron", P(tensor=2), role="reward_model", variant="qwen2-tied"),
}  # fmt: skip
FEW = [
    "Megatron, experts in bfloat16",
    "FSDP2",
    "adapters on Megatron",
    "a value model",
    "adapters beside tables of whole numbers",
]


def body(world: Any, model: Path, folder: Path, case: Case) -> None:
    config = config_of(
        model, case.parallel, OptimizerConfig(learning_rate=1e-2), dtype=case.dtype, backend=case.backend,
        lora=LoRA(rank=case.rank) if case.rank else None, keep_reference=True,
    )  # fmt: skip
    backend = built_backend(config)
    value = case.role == "reward_model"
    trained = backend.value_model(config, role="critic") if value else backend.policy(config)
    if not value:
        trained.step(given(rows_of([[1, 2, 3], [4, 5, 6, 7]])), cross_entropy_loss())
    TrainingCheckpoints(folder / "checkpoints", {case.role: trained}, config).save({}, step=1)
    export(trained, folder / "exported", TrainerConfig())


def saved(folder: Path, case: Case) -> Path:
    """A folder of weights; those that adapters are merged into are of the run's dtype."""
    if case.variant == "deepseek_v4":
        folder.mkdir()
        save_tiny_of(case.variant, folder)
    else:
        save_tiny(folder, case.variant)
    if case.rank:
        dtype = getattr(torch, case.dtype)
        held = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in weights(folder).items()
        }
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weights(folder: Path) -> dict[str, Any]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.ranks) for name in CASES],
)
def test_a_checkpoint_of_a_run_becomes_what_the_run_exports(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    model = saved(tmp_path / "model", case)
    run_ranks(2, body, model, tmp_path, case)
    assert convert.main(["to-hf", str(tmp_path / "checkpoints"), str(tmp_path / "made")]) == 0
    assert f"the {case.role} after step 1" in capsys.readouterr().out
    for suffix in ("", "_adapter") if case.rank else ("",):
        made, expected = tmp_path / f"made{suffix}", tmp_path / f"exported{suffix}"
        one, other = weights(made), weights(expected)
        assert one.keys() == other.keys()
        assert all(tensor.equal(other[key]) for key, tensor in one.items())
        file = "adapter_config.json" if suffix else "config.json"
        assert json.loads((made / file).read_text()) == json.loads((expected / file).read_text())
    step = tmp_path / "checkpoints/step_000001"
    assert inspect_checkpoint.main([str(step), "--check", "--tensors"]) == 0
    said = capsys.readouterr().out
    assert "a run's checkpoint, after step 1" in said and "all as in the manifest" in said
    assert f"rftmega convert to-hf {step} OUT" in said
    assert ("adapters {'rank': 4" in said) == bool(case.rank)


def test_a_folder_that_went_elsewhere_is_asked_for_and_another_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny(tmp_path / "model", "qwen3")
    run_ranks(2, body, model, tmp_path, Case("megatron", rank=4))
    model.rename(tmp_path / "moved")
    step, out = str(tmp_path / "checkpoints/step_000001"), str(tmp_path / "out")
    assert convert.main(["to-hf", step, out]) == 2
    assert f"began with {model}" in (said := capsys.readouterr().err) and "--base HF_DIR" in said
    strange = save_tiny(tmp_path / "strange", "qwen3", seed=1)
    assert convert.main(["to-hf", step, out, "--base", str(strange)]) == 2
    assert "belong to other weights" in capsys.readouterr().err
    assert convert.main(["to-hf", step, out, "--base", str(tmp_path / "moved")]) == 0
    assert convert.main(["to-hf", step, str(tmp_path / "more"), "--model", "critic"]) == 2
    assert "holds policy, and no critic" in capsys.readouterr().err
