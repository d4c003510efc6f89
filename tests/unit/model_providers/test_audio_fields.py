"""Configurations of models that hear: every field is honoured or refused, and the table is that of
transformers.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, Qwen2AudioForConditionalGeneration

from rftmega.converters import instances, table
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import describe
from tests.tiny_audio import audio_config, save_tiny_audio

# what Qwen/Qwen2-Audio-7B says, whose decoder's sizes are those that transformers takes
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "audio_config": {
        "model_type": "qwen2_audio_encoder", "num_mel_bins": 128, "encoder_layers": 32, "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120, "encoder_layerdrop": 0.0, "d_model": 1280, "dropout": 0.0, "attention_dropout": 0.0,
        "activation_function": "gelu", "activation_dropout": 0.0, "scale_embedding": False, "init_std": 0.02,
        "max_source_positions": 1500,
    },
    "audio_token_index": 151646,
    "ignore_index": -100,
    "model_type": "qwen2_audio",
    "text_config": {
        "bos_token_id": 151643, "eos_token_id": 151645, "intermediate_size": 11008, "max_position_embeddings": 8192,
        "model_type": "qwen2", "rms_norm_eps": 1e-05, "rope_theta": 10000, "sliding_window": 32768,
        "torch_dtype": "bfloat16", "use_mrope": False, "vocab_size": 156032,
    },
    "torch_dtype": "bfloat16",
    "vocab_size": 156032,
}  # fmt: skip


def test_names_shapes_and_the_count_are_those_of_the_folder(tmp_path: Path) -> None:
    fields = json.loads((save_tiny_audio(tmp_path) / "config.json").read_text())
    ours = {}
    for rule, layer, _ in instances(table(fields), layers=4, experts=0):
        shapes = [tuple(tensor.shape) for tensor in rule.hf]
        ours.update(zip(rule.hf_names(layer), shapes, strict=True))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert ours == theirs
    model = Qwen2AudioForConditionalGeneration.from_pretrained(tmp_path)
    assert describe(fields).parameters == sum(p.numel() for p in model.parameters())


def test_a_published_config_without_the_decoder_s_sizes_is_the_model_of_transformers() -> None:
    known = AutoConfig.for_model(**copy.deepcopy(PUBLISHED))
    with torch.device("meta"):
        model = Qwen2AudioForConditionalGeneration(known)
    assert describe(PUBLISHED).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("part", "name", "value", "said"),
    [
        ("text_config", "logit_scale", 2.0, "logit_scale=2.0"),
        ("text_config", "vocab_size", None, "vocab_size is null"),
        ("text_config", "tie_word_embeddings", True, "a head of its own"),
        ("audio_config", "surprise", 1, "surprise=1 is not honoured"),
        ("audio_config", "activation_function", "relu", "activation_function='relu'"),
        ("audio_config", "encoder_layers", 0, "encoder_layers is 0, not a positive whole number"),
        ("audio_config", "num_hidden_layers", 3, "num_hidden_layers=3 is not encoder_layers=2"),
        ("audio_config", "encoder_attention_heads", 3, "3 heads can't share a width of 32"),
        ("audio_config", "num_mel_bins", None, "num_mel_bins is missing"),
        (None, "audio_token_id", 7, "audio_token_index=5 and audio_token_id=7"),
        (None, "audio_token_index", None, "no audio_token_index"),
        (None, "audio_config", None, "no audio_config"),
    ],
)
def test_what_is_not_honoured_is_refused(
    part: str | None, name: str, value: Any, said: str
) -> None:
    changed = audio_config().to_dict()
    (changed if part is None else changed[part])[name] = value
    with pytest.raises(CheckpointError, match=said):
        described_and_tabled(changed)


def test_a_tower_s_dropout_is_left_out() -> None:
    plain = audio_config().to_dict()
    dropping = plain | {"audio_config": plain["audio_config"] | {"dropout": 0.1, "layerdrop": 0.5}}
    assert describe(dropping) == describe(plain)


def described_and_tabled(fields: dict[str, Any]) -> None:
    describe(fields)
    table(fields)
