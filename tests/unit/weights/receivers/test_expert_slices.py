"""vLLM's own loader of gpt-oss gets what it reads: an expert's slices, which it splits over ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.model_executor.models.gpt_oss import GptOssModel, GptOssRoutedExperts

from rftmega.model_providers.hf_config import read_hf_config
from rftmega.models.hf.stacked_files import open_folder
from rftmega.weights.receivers.expert_slices import expert_slices
from tests.tiny_models import save_tiny

EXPERTS, FFN, HIDDEN = 4, 96, 64
STEM = "model.layers.1.mlp.experts"


def streamed(folder: Path) -> list[tuple[str, Tensor]]:
    """All tensors of the folder as a push sends them: matrices and biases of each expert."""
    files = open_folder(folder, read_hf_config(folder))
    return [(name, files.whole(name, files.shape_of(name))) for name in files.names]


class Experts:
    """The parameters of vLLM's experts on rank `rank` of 2, and vLLM's loader of them."""

    def __init__(self, rank: int):
        half = FFN // 2
        shapes = {
            "w13_weight": (EXPERTS, 2 * half, HIDDEN),
            "w13_bias": (EXPERTS, 2 * half),
            "w2_weight": (EXPERTS, HIDDEN, half),
            "w2_bias": (EXPERTS, HIDDEN),
        }
        self.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_rank=rank))
        self.quant_method = SimpleNamespace()
        self.parameters: dict[str, Any] = {}
        for name, shape in shapes.items():
            parameter = torch.nn.Parameter(torch.full(shape, torch.nan))
            parameter.weight_loader = self.load  # type: ignore[attr-defined]
            self.parameters[f"{STEM}.routed_experts.{name}"] = parameter

    _narrow_for_rank = staticmethod(GptOssRoutedExperts._narrow_for_rank)
    _copy_to_expert = staticmethod(GptOssRoutedExperts._copy_to_expert)
    _load_expert_bias: Any = GptOssRoutedExperts._load_expert_bias
    _load_unquantized_expert: Any = GptOssRoutedExperts._load_unquantized_expert
    load: Any = GptOssRoutedExperts.weight_loader

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return expert


@pytest.mark.parametrize("rank", [0, 1])
def test_the_loader_of_vllm_fills_its_experts_as_from_the_folder(rank: int, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "gpt-oss")
    stored, experts, loaded = load_file(folder / "model.safetensors"), Experts(rank), set[str]()
    for name, tensor in expert_slices(folder, streamed(folder)):
        if ".experts." not in name:
            assert torch.equal(tensor, stored[name])
        elif name.startswith(STEM):
            renamed = name.replace("gate_up_proj", "w13").replace("down_proj", "w2")
            renamed += "" if renamed.endswith("_bias") else "_weight"
            assert GptOssModel._try_load_streamed_expert(
                renamed, tensor, experts.parameters, loaded
            )
    gate_up, down = stored[f"{STEM}.gate_up_proj"], stored[f"{STEM}.down_proj"]
    here, half = slice(rank * FFN, (rank + 1) * FFN), slice(rank * FFN // 2, (rank + 1) * FFN // 2)
    found = {name.rpartition(".")[2]: each.detach() for name, each in experts.parameters.items()}
    assert loaded == experts.parameters.keys()
    assert torch.equal(found["w13_weight"], gate_up[:, :, here].transpose(1, 2))
    assert torch.equal(found["w2_weight"], down[:, half].transpose(1, 2))
    assert torch.equal(found["w13_bias"], stored[f"{STEM}.gate_up_proj_bias"][:, here])
    bias = stored[f"{STEM}.down_proj_bias"]
    assert torch.equal(found["w2_bias"], bias if rank == 0 else torch.zeros_like(bias))


def test_the_matrices_of_another_model_stay_as_they_are(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3-moe")
    tensors = list(load_file(folder / "model.safetensors").items())
    assert [name for name, _ in expert_slices(folder, tensors)] == [name for name, _ in tensors]
