"""Configurations of models that see: every field is honoured or refused, and the table is that of
transformers.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from rftmega.config import ParallelConfig
from rftmega.converters import instances, stacks_of, table
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import describe, layout_violations
from tests.tiny_vision import EXPERTS, KINDS, by_matrix, save_tiny_vision

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    # hub's config.json, text and tower, and the parameters that transformers makes of them
    "Qwen2-VL-2B": (
        {
            "model_type": "qwen2_vl", "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
            "num_hidden_layers": 28, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
            "max_window_layers": 28, "use_sliding_window": False, "sliding_window": 32768, "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rms_norm_eps": 1e-6,
        },
        {
            "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536,
            "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
        },
        2_208_985_600,
    ),
    "Qwen2.5-VL-3B": (
        {
            "model_type": "qwen2_5_vl", "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
            "num_hidden_layers": 36, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
            "max_window_layers": 70, "use_sliding_window": False, "sliding_window": 32768, "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_token_id": 151654,
            "rms_norm_eps": 1e-6,
        },
        {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
            "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
        },
        3_754_622_976,
    ),
}  # fmt: skip
IDS = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
       "max_position_embeddings": 32768, "hidden_act": "silu"}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_tiny_vision(tmp_path_factory.mktemp(request.param), request.param)
    return folder, json.loads((folder / "config.json").read_text())


def test_names_shapes_and_the_count_are_those_of_the_folder(config: tuple[Path, Any]) -> None:
    folder, fields = config
    ours = {}
    for rule, layer, expert in instances(table(fields), layers=4, experts=EXPERTS):
        shapes = [tuple(tensor.shape) for tensor in rule.hf]
        ours.update(zip(rule.hf_names(layer, expert), shapes, strict=True))
    disk = by_matrix(load_file(folder / "model.safetensors"))
    assert ours == {name: tuple(tensor.shape) for name, tensor in disk.items()}
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert describe(fields).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_with_the_text_s_fields_outside_is_the_model_of_transformers(
    name: str,
) -> None:
    text, tower, parameters = PUBLISHED[name]
    fields = {**text, **IDS, "vision_config": tower}
    assert describe(fields).parameters == parameters
    known = AutoConfig.for_model(**copy.deepcopy(fields))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(known)
    assert parameters == sum(p.numel() for p in model.parameters())


MOE: dict[str, Any] = {  # Qwen3-VL-30B-A3B, as its makers wrote it
    "model_type": "qwen3_vl_moe", "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
    "vision_end_token_id": 151653, "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_moe_text", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 262144,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_theta": 5000000, "use_cache": True, "vocab_size": 151936,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "vision_config": {
        "model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304,
        "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip


def test_the_published_moe_has_the_parameters_and_shapes_of_transformers() -> None:
    found = describe(MOE)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**copy.deepcopy(MOE)))
    assert found.parameters == sum(p.numel() for p in model.parameters()) == 31_070_754_032
    assert found.rope.base == 5000000
    theirs = {
        name: tuple(tensor.shape)
        for name, tensor in model.named_parameters()
        if ".experts." in name
    }
    assert {stack.name: stack.untransposed for stack in stacks_of(MOE)} == theirs


SPARSE: tuple[dict[str, Any], ...] = (
    {},
    {"mlp_only_layers": None},
    {"mlp_only_layers": [0, 2]},
    {"mlp_only_layers": [], "decoder_sparse_step": 2},
    {"mlp_only_layers": [3], "decoder_sparse_step": 2},
)


@pytest.mark.parametrize("fields", SPARSE)
def test_layers_with_experts_and_the_base_of_the_rotation_are_those_of_transformers(
    fields: dict[str, Any],
) -> None:
    written = copy.deepcopy(MOE)
    text = written["text_config"]
    del text["mlp_only_layers"], text["decoder_sparse_step"], text["rope_theta"]
    text |= {"num_hidden_layers": 4} | fields
    theirs = AutoConfig.for_model(**copy.deepcopy(written))
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(theirs)
    layers = enumerate(model.model.language_model.layers)
    wanted = {number for number, layer in layers if hasattr(layer.mlp, "experts")}
    found = describe(written)
    assert found.experts is not None
    assert found.experts.layers == wanted
    assert found.rope.base == theirs.text_config.rope_parameters["rope_theta"]
    assert found.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("norm_topk_prob", False, "norm_topk_prob=false is not supported"),
        ("num_experts_per_tok", 200, "more than the 128 experts"),
        (
            "moe_intermediate_size",
            1024,
            "nobody can tell whether a folder's experts are transposed",
        ),
        (
            "moe_intermediate_size",
            2048,
            "nobody can tell whether a folder's experts are transposed",
        ),
        ("num_local_experts", 64, "num_experts=128 and num_local_experts=64"),
        ("sliding_window", 4096, "sliding_window=4096"),
    ],
)
def test_what_a_moe_can_t_be_is_refused(name: str, value: Any, said: str) -> None:
    changed = copy.deepcopy(MOE)
    changed["text_config"][name] = value
    with pytest.raises(CheckpointError, match=said):
        described_and_tabled(changed)


def test_both_ways_of_writing_describe_one_model(config: tuple[Path, Any]) -> None:
    _, fields = config
    outside = {k: v for k, v in fields["text_config"].items() if k not in ("model_type", "dtype")}
    flat = outside | {name: value for name, value in fields.items() if name != "text_config"}
    assert describe(flat) == describe(fields)


@pytest.mark.parametrize(
    ("part", "name", "value", "said"),
    [
        ("text_config", "logit_scale", 2.0, "logit_scale=2.0"),
        ("text_config", "hidden_act", "gelu", "hidden_act"),
        ("text_config", "num_key_value_heads", None, "num_key_value_heads is null"),
        ("text_config", "tie_word_embeddings", True, "Leave one of them out"),
        ("vision_config", "surprise", 1, "surprise=1 is not honoured"),
        ("vision_config", "depth", 0, "depth is 0, not a positive whole number"),
        ("vision_config", "depth", "2", "depth is '2'"),
        ("vision_config", "hidden_act", "relu", "hidden_act='relu' is not supported"),
        ("vision_config", "num_heads", 3, "3 heads can't share"),
        ("vision_config", "patch_size", None, "patch_size is missing"),
        ("vision_config", "rope_parameters", {"rope_theta": 5.0}, "only a base of 10000"),
        (None, "image_token_id", None, "no image_token_id"),
        (None, "vision_config", None, "no vision_config"),
    ],
)
def test_what_is_not_honoured_is_refused(
    config: tuple[Path, Any], part: str | None, name: str, value: Any, said: str
) -> None:
    changed = copy.deepcopy(config[1])
    (changed if part is None else changed[part])[name] = value
    with pytest.raises(CheckpointError, match=said):
        described_and_tabled(changed)


def described_and_tabled(fields: dict[str, Any]) -> None:
    describe(fields)
    table(fields)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"mrope_section": [4, 6]}, "must list three whole numbers"),
        ({"mrope_section": [4, 6, 7]}, "does not add up to half of what is rotated of a head, "),
        ({"rope_type": "yarn", "factor": 2.0}, "not supported with images"),
        ({"surprise": 1}, "surprise=1"),
    ],
)
def test_a_rotation_that_is_not_honoured_is_refused(
    config: tuple[Path, Any], rope: dict[str, Any], said: str
) -> None:
    changed = copy.deepcopy(config[1])
    changed["text_config"]["rope_parameters"] |= rope
    with pytest.raises(CheckpointError, match=said):
        describe(changed)


def test_features_of_other_widths_and_layers_beyond_the_tower_are_refused() -> None:
    from tests.tiny_vision import vision_config

    fields = vision_config("qwen3_vl").to_dict()
    wide = copy.deepcopy(fields)
    wide["vision_config"]["out_hidden_size"] = 64
    with pytest.raises(CheckpointError, match="features of width 64"):
        table(wide)
    beyond = copy.deepcopy(fields)
    beyond["vision_config"]["deepstack_visual_indexes"] = [0, 9]
    with pytest.raises(CheckpointError, match=r"names a layer beyond depth=2"):
        table(beyond)


def test_the_layers_that_the_tower_feeds_must_be_together() -> None:
    from tests.tiny_vision import vision_config

    model = describe(vision_config("qwen3_vl").to_dict())
    assert layout_violations(model, ParallelConfig(pipeline=2)) == []
    for parallel in (ParallelConfig(pipeline=4), ParallelConfig(pipeline=2, virtual_pipeline=2)):
        (said,) = layout_violations(model, parallel)
        assert "the vision tower feeds the first 2, which have to be together" in said
