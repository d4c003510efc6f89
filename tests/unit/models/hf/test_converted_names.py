"""Names of a folder's tensors as transformers reads them."""

import torch
from transformers.core_model_loading import WeightRenaming

from rftmega.models.hf.converted_names import converted_name

KNOWN = {
    "model.layers.0.self_attn.kv_norm.weight": torch.zeros(2),
    "model.norm.weight": torch.zeros(2),
}


def read_as(name: str) -> str:
    renamings = [WeightRenaming(r"\.norm\.", r"\.kv_norm\.")]
    return converted_name(name, renamings, [], "model", KNOWN)[0]


def test_a_pattern_of_transformers_renames_a_tensor() -> None:
    assert read_as("layers.0.self_attn.norm.weight") == "model.layers.0.self_attn.kv_norm.weight"


def test_a_tensor_whose_own_name_is_a_parameter_keeps_it() -> None:
    assert read_as("model.norm.weight") == "model.norm.weight"
    assert read_as("model.norm.bias") == "model.kv_norm.bias"
