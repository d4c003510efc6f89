"""State that nobody trains, a table of whole numbers and a frozen parameter, and tensors that several
parameters are parts of: on two processes in bfloat16, pushed and exported as they were.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.config import OptimizerConfig, ParallelConfig, RolloutConfig, TrainerConfig
from rftmega.rollout.engines.transformers import TransformersEngine
from rftmega.run.evaluation.folder_weights import FolderWeights
from rftmega.run.placement.export import export
from rftmega.trainer.experience import given
from rftmega.weights import EngineWeights
from tests.families import TABLE_OF_EXPERTS, save_tiny_of
from tests.layouts import build_policy, rows_of
from tests.ranks import run_ranks

TOKENS = [[5, 9, 4, 7, 8, 3, 11, 40], [6, 50, 33], [7, 12, 80, 95, 21]]
NAME = "model.safetensors"
FROZEN = "z_L_init"
DIVIDED = "gqkv_proj.weight"


def body(world: Any, folder: Path) -> dict[str, Tensor]:
    """The engine's state after one step and a push."""
    fast = OptimizerConfig(learning_rate=1e-2)
    actor = build_policy(
        folder, ParallelConfig(), fast, backend="fsdp", dtype="bfloat16", keep_reference=True
    )
    where = torch.device("cpu")
    engine = TransformersEngine(folder, RolloutConfig(), stop_ids=[2], where=where)
    sync = EngineWeights(actor.shards(), engine, bucket_bytes=20_000)
    actor.step(given(rows_of(TOKENS)), cross_entropy_loss())
    actor.residency.finish()
    sync.push(version=1)
    export(actor, folder / "trained", TrainerConfig())
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


def exported(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_table_of_token_ids_to_experts_is_kept_pushed_and_exported_in_its_dtype(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    save_tiny_of("deepseek_v4", tmp_path)
    held = load_file(tmp_path / NAME)
    tables = {name for name in held if name.endswith(TABLE_OF_EXPERTS)}
    assert tables and all(held[name].unique().numel() > 1 for name in tables)
    held |= {name: held[name].to(dtype) for name in tables}
    save_file(held, tmp_path / NAME, metadata={"format": "pt"})
    first, second = run_ranks(2, body, tmp_path)
    trained = exported(tmp_path / "trained")
    assert trained.keys() == held.keys()
    for name in tables:
        assert trained[name].dtype == dtype
        assert torch.equal(trained[name], held[name])
    for state in (first, second):
        pushed = [each for name, each in state.items() if name.endswith(TABLE_OF_EXPERTS)]
        wanted = [held[name] for name in sorted(tables)]
        assert len(pushed) == len(wanted)
        assert all(torch.equal(*each) for each in zip(pushed, wanted, strict=True))
    shards = FolderWeights(tmp_path, torch.bfloat16).shards
    read = {shard.logical.names[0]: shard.tensor for shard in shards}
    assert all(torch.equal(read[name], held[name]) for name in tables)
    assert all(read[name].dtype == dtype for name in tables)


def test_a_frozen_parameter_and_divided_tensors_are_pushed_and_exported(tmp_path: Path) -> None:
    save_tiny_of("hrm_text", tmp_path)
    held = load_file(tmp_path / NAME)
    divided = [name for name in held if name.endswith(DIVIDED)]
    assert divided
    state, other = run_ranks(2, body, tmp_path)
    assert state.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in state.items())
    trained = exported(tmp_path / "trained")
    assert {name: each.shape for name, each in trained.items()} == {
        name: each.shape for name, each in held.items()
    }
    (frozen,) = (name for name in held if name.endswith(FROZEN))
    assert held[frozen].abs().max() > 0.01
    assert torch.equal(trained[frozen], held[frozen].to(torch.bfloat16))
    (pushed,) = (each for name, each in state.items() if name.endswith(FROZEN))
    assert torch.equal(pushed, trained[frozen].float())
    for name in divided:
        stem = name.removesuffix(f"attn.{DIVIDED}")
        parts = [state[f"{stem}self_attn.{each}_proj.weight"] for each in ("gate", "q", "k", "v")]
        assert torch.equal(torch.cat(parts), trained[name].float())
        assert not torch.equal(trained[name], held[name].to(torch.bfloat16)), "nothing was learnt"
