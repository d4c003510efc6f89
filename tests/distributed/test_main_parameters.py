"""Main parameters of a model in bfloat16 have the digits of the folder that it was read from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rftmega.backends.megatron.training_state import MAIN, optimizer_tensors
from rftmega.config import OptimizerConfig, ParallelConfig
from tests.layouts import build_actor
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
DISTRIBUTED = OptimizerConfig(distributed=True)
LAYOUTS = {
    "TP2 x PP2": ("qwen3", 4, P(tensor=2, pipeline=2), OptimizerConfig()),
    "EP2, distributed optimizer": ("qwen3-moe", 4, P(expert=2), DISTRIBUTED),
}


def main_body(
    world: Any, folder: Path, parallel: ParallelConfig, optimizer: OptimizerConfig
) -> dict[str, int]:
    """Elements of main parameters by tensor, all of which are the folder's."""
    actor = build_actor(folder, parallel, optimizer, dtype="bfloat16")
    files = load_file(folder / "model.safetensors")
    found: dict[str, int] = {}
    for box in optimizer_tensors(actor.manager):
        kind, _, name = box.key.partition("/")
        if kind != MAIN:
            continue
        ends = zip(box.offset, box.tensor.shape, strict=True)
        here = files[name][tuple(slice(start, start + size) for start, size in ends)]
        assert box.tensor.dtype == torch.float32
        assert torch.equal(box.tensor, here.float()), name
        found[name] = found.get(name, 0) + box.tensor.numel()
    for item in actor.manager.bound:
        assert item.parameter.dtype == torch.bfloat16
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_main_parameters_are_what_the_folder_holds_not_what_was_rounded(
    name: str, tmp_path: Path
) -> None:
    variant, processes, *layout = LAYOUTS[name]
    folder = save_tiny(tmp_path, variant)
    whole = load_file(folder / "model.safetensors")
    rounded = [name for name, each in whole.items() if not torch.equal(each, each.bfloat16())]
    assert len(rounded) > len(whole) / 2
    by_process = run_ranks(processes, main_body, folder, *layout)
    assert set().union(*by_process) == whole.keys()


def test_a_folder_in_bfloat16_gives_what_the_weights_are(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    file = folder / "model.safetensors"
    half = {name: each.bfloat16() for name, each in load_file(file).items()}
    save_file(half, file, {"format": "pt"})
    (found,) = run_ranks(1, main_body, folder, P(), OptimizerConfig())
    assert found == {name: each.numel() for name, each in half.items()}
