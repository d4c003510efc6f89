"""Tensors of a PEFT folder that nothing would read, and frozen weights that are not the model's, are
refused on both backends, by one process or several, and by a merge.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rftmega.config import LoRA, ParallelConfig
from rftmega.core.errors import CheckpointError
from rftmega.run.conversion import adapters
from tests import plain_adapters
from tests.layouts import build_policy
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
TARGETS = ("q_proj", "embed_tokens", "lm_head")
WEIGHTS = "adapter_model.safetensors"
LAYOUTS = [
    pytest.param("megatron", 1, P(), marks=pytest.mark.ranks),
    pytest.param("megatron", 2, P(pipeline=2), marks=pytest.mark.ranks),
    ("megatron", 2, P(tensor=2)),
    pytest.param("fsdp", 1, P(), marks=pytest.mark.ranks),
    ("fsdp", 2, P()),
    pytest.param("fsdp", 2, P(tensor=2), marks=pytest.mark.ranks),
]


def body(
    world: Any, folder: Path, adapters: Sequence[Path], parallel: ParallelConfig, backend: str
) -> list[str]:
    """What is said of each folder of adapters."""
    found = []
    for adapter in adapters:
        lora = LoRA(rank=4, alpha=6.0, targets=list(TARGETS), path=str(adapter))
        try:
            build_policy(folder, parallel, backend=backend, lora=lora)
        except CheckpointError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def written(tmp_path: Path) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    folder = save_tiny(tmp_path / "model", "qwen3")
    pairs = plain_adapters.random_pairs(folder, rank=4, targets=TARGETS)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=6.0)
    held = load_file(adapter / WEIGHTS)
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    for module in ("model.embed_tokens", "lm_head"):  # PEFT's copies
        copy = weights[f"{module}.weight"].clone()
        held[f"{plain_adapters.PREFIX}{module}.base_layer.weight"] = copy
    save_file(held, adapter / WEIGHTS)
    return folder, adapter, held


@pytest.mark.parametrize(("backend", "processes", "parallel"), LAYOUTS)
def test_what_nothing_reads_and_what_is_another_matrix_is_refused_on_all_processes(
    backend: str, processes: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    folder, adapter, held = written(tmp_path)
    name = f"{plain_adapters.PREFIX}model.layers.9.self_attn.q_proj.lora_"
    other = name.replace("layers.9", "layers.0")
    beyond = {f"{name}{letter}.weight": held[f"{other}{letter}.weight"].clone() for letter in "AB"}
    others = [beyond]
    wanted = ["layers.9.self_attn.q_proj.lora_A.weight' (2 such) has no place in this model"]
    for module in ("lm_head", "model.embed_tokens"):
        copy = f"{plain_adapters.PREFIX}{module}.base_layer.weight"
        changed = held[copy].clone()
        changed[-1, -1] += 0.5  # in the last process's rows
        others.append({copy: changed})
        wanted.append(f"{copy}' is another matrix than the model's own")
    folders = [adapter]
    for number, other in enumerate(others):
        folders.append(tmp_path / f"other{number}")
        shutil.copytree(adapter, folders[-1])
        save_file(held | other, folders[-1] / WEIGHTS)
    for own, *told in run_ranks(processes, body, folder, folders, parallel, backend):
        assert own == ""
        for said, reason in zip(told, wanted, strict=True):
            assert reason in said


def test_a_merge_refuses_another_frozen_weight_and_half_a_pair(tmp_path: Path) -> None:
    folder, adapter, held = written(tmp_path)
    adapters.merge(folder, adapter, tmp_path / "merged")
    copy = f"{plain_adapters.PREFIX}lm_head.base_layer.weight"
    save_file(held | {copy: held[copy] + 1}, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match="is another matrix than the model's own"):
        adapters.merge(folder, adapter, tmp_path / "again")
    alone = f"{plain_adapters.PREFIX}model.layers.0.self_attn.v_proj.lora_B.weight"
    save_file(held | {alone: torch.ones(4, 4)}, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"v_proj\.lora_B\.weight' is no matrix of a pair"):
        adapters.merge(folder, adapter, tmp_path / "again")
    both = {alone: torch.ones(4, 4), alone.replace("lora_B", "lora_A"): torch.ones(4, 4)}
    save_file(held | both, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match="v_proj', which target_modules do not name"):
        adapters.merge(folder, adapter, tmp_path / "again")
