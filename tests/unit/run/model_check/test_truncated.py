"""The copy of a model's first layers: any family's pattern of layers."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.models.hf.hf_folder import HFFolder
from rftmega.run.model_check import truncated, weights
from tests.tiny_models import save_tiny, with_predictor


def test_a_config_is_shortened_in_every_field_with_an_entry_for_each_layer() -> None:
    config = {
        "num_hidden_layers": 6, "layer_types": ["a", "a", "b"] * 2, "mlp_only_layers": [0, 1, 5], "max_window_layers": 5,
        "hybrid_override_pattern": "MM*MM-", "attn_type_list": [1] * 6, "num_nextn_predict_layers": 1, "model_type": "abcdef",
        "no_rope_layers": [1, 0] * 3, "rope_scaling": {"factor": 2.0}, "eos_token_id": [1, 2, 3, 4, 5, 6],
        "vision_config": {"num_hidden_layers": 6, "depth": 6}, "per_layer_config": {"1": {}, "4": {}},
        "num_attention_heads": 6,
    }  # fmt: skip
    assert truncated.shortened(config, 6, 3) == config | {
        "num_hidden_layers": 3, "layer_types": ["a", "a", "b"], "mlp_only_layers": [0, 1], "max_window_layers": 3,
        "hybrid_override_pattern": "MM*", "attn_type_list": [1] * 3, "num_nextn_predict_layers": 0, "no_rope_layers": [1, 0, 1],
        "per_layer_config": {"1": {}},
    }  # fmt: skip
    nested = {"text_config": {"num_hidden_layers": 6}, "num_hidden_layers": 9}
    assert truncated.layers_in(nested, ()) == 6
    assert truncated.shortened(nested, 6, 2)["text_config"] == {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp.up_proj.weight", 12),
        ("transformer.h.3.attn.weight", 3),
        ("model.language_model.layers.7.x", 7),
        ("model.visual.blocks.3.attn.weight", None),
        ("vision_tower.encoder.layers.2.x", None),
        ("model.embed_tokens.weight", None),
        ("model.layers.1.mlp.experts.5.up_proj.weight", 1),
    ],
)
def test_the_layer_of_a_tensor_is_read_from_its_name(name: str, layer: int | None) -> None:
    assert truncated.layer_of(name) == layer


@pytest.mark.parametrize(
    ("kinds", "fewest"),
    [("aaaa", 2), ("aaab", 4), ("abab", 2), ("aaabaaab", 4), ("a", 1), ("abbbcb", 5)],
)
def test_so_many_layers_are_taken_as_have_one_of_each_kind(kinds: str, fewest: int) -> None:
    assert truncated.fewest_layers(kinds) == fewest


@pytest.mark.parametrize(
    ("variant", "fewest"),
    [("llama", 2), ("qwen3-next-moe", 2), ("deepseek-v3", 2), ("gemma3", 3), ("qwen3-moe", 2)],
)
def test_the_copy_is_a_model_of_so_many_layers_with_the_same_tensors(
    variant: str, fewest: int, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save_tiny(source, variant)
    if variant == "deepseek-v3":
        with_predictor(source, 4)
    target.mkdir()
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    files = HFFolder(source)
    assert truncated.fewest_layers(truncated.kinds_of_layers(files, config, 4)) == fewest
    seen: list[int] = []
    truncated.copy(source, target, 4, fewest, progress=seen.append)
    read = weights.read(target, ("megatron",))
    assert describe(read_hf_config(target)).layers == fewest
    assert weights.of_files(target, read)[0].state == "ok"
    before, after = load_file(source / "model.safetensors"), {}
    for file in target.glob("*.safetensors"):
        after |= load_file(file)
    assert all(bool((before[name] == tensor).all()) for name, tensor in after.items())
    assert sum(seen) == truncated.bytes_with(files, fewest)
    assert sum(each.numel() for each in after.values()) == truncated.elements_with(files, fewest)
    gone = {truncated.layer_of(name) for name in before.keys() - after.keys()}
    assert gone == {*range(fewest, 5 if variant == "deepseek-v3" else 4)}


def test_the_number_of_layers_is_that_of_the_tensors_if_config_json_says_none() -> None:
    names = ["model.layers.0.x.weight", "model.layers.6.x.weight", "model.visual.blocks.9.x"]
    assert truncated.layers_in({"num_hidden_layers": True}, names) == 7
