"""Configurations of models that see: every field is honoured or refused, and the table is that of
transformers.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForImageTextToText

from converters import instances, table
from model_providers.description import describe, layout_violations
from rftmega.config import ParallelConfig
from rftmega.errors import CheckpointError
from tests.tiny_vision import KINDS, save_tiny_vision

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
    for rule, layer, _ in instances(table(fields), layers=4, experts=0):
        shapes = [tuple(tensor.shape) for tensor in rule.hf]
        ours.update(zip(rule.hf_names(layer), shapes, strict=True))
    with safe_open(folder / "model.safetensors", "pt") as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert ours == theirs
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


def test_both_ways_of_writing_describe_one_model(config: tuple[Path, Any]) -> None:
    _, fields = config
    outside = {k: v for k, v in fields["text_config"].items() if k not in ("model_type", "dtype")}
    flat = outside | {name: value for name, value in fields.items() if name != "text_config"}
    assert describe(flat) == describe(fields)


@pytest.mark.parametrize(
    ("part", "name", "value", "said"),
    [
        ("text_config", "surprise", 1, "surprise=1"),
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
        ({"mrope_section": [4, 6, 7]}, "does not add up to half of a head, 16"),
        ({"rope_type": "yarn", "factor": 2.0}, "not supported with pictures"),
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
