"""A folder that holds experts' matrices as one tensor is read by the matrix, whoever wrote it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rftmega.backends.megatron.load import refuse_strangers
from rftmega.converters import stacks_of, table
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.models.hf.hf_folder import HFFolder, PlannedTensor, checksum
from rftmega.models.hf.stacked_files import Stacking, open_folder
from tests.packed_weights import pack_folder
from tests.tiny_models import save_tiny
from tests.tiny_vision import EXPERTS, by_matrix, publish_experts, save_tiny_vision

LAYER = "model.language_model.layers.2.mlp.experts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_vision(tmp_path, "qwen3_vl_moe")


def opened(folder: Path) -> HFFolder:
    return open_folder(folder, read_hf_config(folder))


@pytest.mark.parametrize("written_by", ["its makers", "transformers 5"])
def test_a_matrix_and_any_piece_of_it_are_those_of_the_folder(
    folder: Path, written_by: str
) -> None:
    if written_by == "transformers 5":
        publish_experts(folder / "model.safetensors")  # transposes once more
    wanted = by_matrix(load_file(folder / "model.safetensors"))
    files = opened(folder)
    assert sorted(files.names) == sorted(wanted)
    for name, tensor in wanted.items():
        shape = tuple(tensor.shape)
        assert name in files
        assert files.shape_of(name) == shape
        assert files.dtype_of(name) == tensor.dtype
        assert torch.equal(files.whole(name, shape), tensor)
    for name in (
        f"{LAYER}.3.gate_proj.weight",
        f"{LAYER}.1.up_proj.weight",
        f"{LAYER}.2.down_proj.weight",
    ):
        tensor = wanted[name]
        piece = files.slice_of(name, tuple(tensor.shape))
        for index in (
            slice(3, 7),
            slice(None),
            (slice(None), slice(5, 9)),
            (slice(1, 4), slice(2)),
        ):
            assert torch.equal(piece[index], tensor[index])
        halves = [torch.empty_like(half) for half in tensor.split([10, len(tensor) - 10])]
        assert files.fill(halves, name, tuple(tensor.shape)) == checksum(tensor.contiguous())
        assert torch.equal(torch.cat(halves), tensor)


@pytest.mark.parametrize("packed", [False, True])
def test_gate_and_up_of_gpt_oss_alternate_in_the_stack(packed: bool, tmp_path: Path) -> None:
    """Also where the stack is stored in MXFP4."""
    folder = save_tiny(tmp_path / "plain", "gpt-oss", intermediate_size=32)
    stored = load_file(folder / "model.safetensors")
    if packed:
        stored = pack_folder(folder, tmp_path / "packed")
        folder = tmp_path / "packed"
    files, stem = opened(folder), "model.layers.2.mlp.experts"
    gate_up, down = stored[f"{stem}.gate_up_proj"][3], stored[f"{stem}.down_proj"][3]
    bias = stored[f"{stem}.gate_up_proj_bias"][3]
    wanted = {
        "gate_proj.weight": gate_up.T[::2],
        "up_proj.weight": gate_up.T[1::2],
        "down_proj.weight": down.T,
        "gate_proj.bias": bias[::2],
        "up_proj.bias": bias[1::2],
        "down_proj.bias": stored[f"{stem}.down_proj_bias"][3],
    }
    for name, tensor in wanted.items():
        whole = files.whole(f"{stem}.3.{name}", tuple(tensor.shape))
        piece = files.slice_of(f"{stem}.3.{name}", tuple(tensor.shape))
        assert torch.equal(whole, tensor), name
        assert torch.equal(piece[5:12], tensor[5:12]), name
        if tensor.dim() == 2:
            assert torch.equal(piece[3:7, 9:30], tensor[3:7, 9:30]), name


def test_the_table_reads_all_of_it_and_a_tensor_more_is_a_stranger(folder: Path) -> None:
    fields = read_hf_config(folder)

    def check() -> None:
        rules = table(fields)
        refuse_strangers(opened(folder), rules, fields, experts=EXPERTS, allowed=frozenset())

    check()
    path = folder / "model.safetensors"
    # of a dense layer
    save_file(load_file(path) | {LAYER.replace("2", "1") + ".down_proj": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="layers.1.mlp.experts.down_proj"):
        check()


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (
            {f"{LAYER}.down_proj": torch.ones(4, 48, 127)},
            r"asks for \(4, 48, 128\), or .* \(4, 128, 48\)",
        ),
        (
            {f"{LAYER}.0.down_proj.weight": torch.ones(128, 48)},
            "and once more in .*experts.down_proj",
        ),
    ],
)
def test_a_stack_of_another_shape_and_a_matrix_that_is_there_twice_are_refused(
    folder: Path, added: dict[str, Tensor], said: str
) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | added, path)
    with pytest.raises(CheckpointError, match=said):
        opened(folder)


def test_quantised_experts_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors: dict[str, Any] = load_file(path)
    tensors[f"{LAYER}.down_proj"] = tensors[f"{LAYER}.down_proj"].to(torch.int8)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="is of dtype I8"):
        opened(folder).slice_of(f"{LAYER}.0.down_proj.weight", (128, 48))


def test_a_stream_of_matrices_becomes_what_its_makers_publish(folder: Path) -> None:
    """Matrices come in whatever order, other tensors between them."""
    wanted = load_file(folder / "model.safetensors")
    stream = sorted(by_matrix(wanted).items(), key=lambda named: checksum(named[1].contiguous()))
    planned = [PlannedTensor(name, each.dtype, tuple(each.shape)) for name, each in stream]
    stacking = Stacking(stacks_of(read_hf_config(folder)))
    found = list(stacking.stacked(stream))
    told = stacking.planned(planned)
    assert [(name, each.dtype, tuple(each.shape)) for name, each in found] == told
    assert {name for name, _ in found} == wanted.keys()
    assert all(torch.equal(each, wanted[name]) for name, each in found)
    some = {f"{LAYER}.down_proj", "lm_head.weight"}
    matrices = {f"{LAYER}.{expert}.down_proj.weight" for expert in range(EXPERTS)}
    assert stacking.matrices(some) == matrices | {"lm_head.weight"}
