"""Configs of transformers that the second backend trains, and those that it can't."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rftmega.backends.decoder import meta_decoder
from rftmega.backends.decoder.describe import (
    beyond_its_positions,
    describe_any,
    read_config,
    tower_of,
)
from rftmega.backends.runner.flops import layer_weights
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.model_providers.transformers_decoders import SEEING, on_meta
from tests.family_configs import tiny_config
from tests.tiny_decoders import save_decoder
from tests.tiny_vision import save_tiny_vision

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [2.0] * 4,
    "short_factor": [1.0] * 4,
    "original_max_position_embeddings": 64,
}


def edited(folder: Path, family: str, **fields: Any) -> Path:
    path = save_decoder(folder, family) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}),
    ],
)
def test_rows_that_would_change_the_angles_of_others_are_refused(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    kind = fields["rope_parameters"]["rope_type"]
    config = read_config(edited(tmp_path, family, **fields))
    assert beyond_its_positions(config, 64) == []
    (said,) = beyond_its_positions(config, 65)
    assert f"rope_type={kind}" in said
    assert "up to 65" in said


def test_attention_to_the_highest_scores_is_refused_where_rows_are_longer() -> None:
    config = tiny_config("doge")
    config.keep_window_size = 64
    assert beyond_its_positions(config, 64) == []
    (said,) = beyond_its_positions(config, 65)
    assert "keep_window_size=64" in said and "up to 65 tokens" in said


@pytest.mark.parametrize(
    ("kind", "fields", "number"),
    [("doge", {}, 0), ("doge", {"is_moe": True}, 4), ("aria_text", {}, 4)],
)
def test_experts_are_described_if_a_model_has_some(
    kind: str, fields: dict[str, Any], number: int
) -> None:
    config = tiny_config(kind)
    for name, value in fields.items():
        setattr(config, name, value)
    found = meta_decoder.describe(on_meta(config, "eager"), None).experts
    assert (found.number if found else 0) == number


def test_angles_that_stay_are_no_reason(tmp_path: Path) -> None:
    config = read_config(save_decoder(tmp_path, "gemma3"))
    assert beyond_its_positions(config, 10_000) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "nobody_knows"}, "has no model_type=nobody_knows"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq' is not read"),
        ({"use_bidirectional_attention": True}, "tokens see later ones"),
        ({"model_type": "llava"}, "more than a decoder of text"),
        ({"model_type": "phi4_multimodal"}, "more than a decoder of text"),
        ({"model_type": "xlm"}, "causal=false: tokens see later ones"),
        ({"model_type": "t5"}, "no language model of model_type=t5"),
        ({"model_type": "musicgen"}, "can't read this config.json: Validation error"),
    ],
)
def test_a_config_that_can_t_be_trained_is_refused(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_config(edited(tmp_path, "phi3", **fields))


@pytest.mark.ranks  # half a minute
def test_every_other_type_of_transformers_is_refused(tmp_path: Path) -> None:
    for model_type in set(CONFIG_MAPPING) - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *SEEING}:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(CheckpointError):
            read_config(tmp_path)


def test_a_config_without_a_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant"}))
    with pytest.raises(CheckpointError, match="gemma4_assistant: .* no hidden_size and no vocab"):
        describe_any(read_config(tmp_path))


def test_a_config_is_described_whatever_its_family(tmp_path: Path) -> None:
    model = describe_any(read_config(save_decoder(tmp_path, "gpt-oss")))
    assert (model.layers, model.heads, model.groups, model.head_dim) == (3, 4, 2, 8)
    assert (model.window, model.windowed) == (6, {0, 2})
    assert model.experts is not None
    assert (model.experts.number, model.experts.active, model.experts.ffn) == (4, 2, 48)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_model_that_sees_is_described_with_its_tower(kind: str, tmp_path: Path) -> None:
    folder = save_tiny_vision(tmp_path, kind)
    config = read_config(folder)
    described = meta_decoder.describe(on_meta(config, "eager"), tower_of(folder, config))
    wanted = describe(read_hf_config(folder))
    assert described.tower == wanted.tower
    assert described.parameters == wanted.parameters
    # what a token of text meets, the tower left out
    assert layer_weights(described) == layer_weights(wanted)
